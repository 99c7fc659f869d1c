"""Launch kernels: choose their configuration, give programs scratch to share, on the right device, in little host time.

Configurations come from configs.json, which octavo ships, or from what `octavo tune` measured on this GPU. A tuned
table lies in the user's cache folder. Its name holds the device, Triton's version and a hash of the shipped table:
under another GPU, Triton or octavo with other kernels the shipped table is used. It is read when octavo's kernels are
imported; nothing is tuned while a model trains.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo.cache import cache_folder
from octavo.granularity import ALL, PADDING
from octavo.kernels.triton.replay import REPLAYS, repeatable
from octavo.numerics import E8M0
from octavo.private import current_device, current_raw_stream, is_in_bad_fork
from octavo.reading import read_json

SHIPPED = Path(__file__).with_name("configs.json")


class Config(NamedTuple):
    """A kernel's tile [tile_r, tile_c], of "optimizer_step" tile_r blocks of tile_c, and a program's warps.

    ``depth``: how many tiles a program does; of kinds of matmul how many stages it loads ahead, of norm_backward how
    many programs a multiprocessor has.
    """

    tile_r: int
    tile_c: int
    depth: int
    num_warps: int


class TileTable(NamedTuple):
    """Configurations of kernels, and the products that torch's own scaled product makes: what a configs.json holds.

    Attributes:
        configs: {kind of kernel: rows}; a row is [the largest log2 of a tensor's elements that it is for, *Config], and
            the last one serves all larger tensors too.
        library: (a's block, b's block, fast_accum) of each of these products.
    """

    configs: dict[str, list[list[int]]]
    library: set[tuple[tuple[int, int], tuple[int, int], bool]]

    @staticmethod
    def tuned_file() -> Path | None:
        """Return the path of the current GPU's table, whether the file exists or not; None without a GPU."""
        if not torch.cuda.is_available() or is_in_bad_fork():
            return None
        device = re.sub(r"\W+", "-", torch.cuda.get_device_name())
        kernels = hashlib.sha256(SHIPPED.read_bytes()).hexdigest()[:8]
        return cache_folder() / f"kernels-{device}-triton-{triton.__version__}-{kernels}.json"

    @classmethod
    def read(cls, path: Path | None) -> TileTable:
        """Return the shipped table; of kinds that the table at ``path`` has, the rows of that one."""
        shipped: dict[str, Any] = read_json(SHIPPED)
        try:
            tuned = {} if path is None else read_json(path)
            rows = shipped["configs"] | tuned.get("configs", {})
            library = {((a[0], a[1]), (b[0], b[1]), bool(fast)) for a, b, fast in (shipped | tuned)["library"]}
            return cls({kind: checked(kind, rows[kind]) for kind in shipped["configs"]}, library)
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            if path is None:
                raise
            return cls.read(None)  # there is no other table, or a damaged one

    def config(self, kind: str, log2_elements: int) -> Config:
        """Return a kind's configuration for a tensor of up to 2^log2_elements elements.

        A program that writes transposed rows writes their padding too, so its tile has at least PADDING rows, whatever
        a row says.
        """
        rows = self.configs[kind]
        chosen = Config(*next((row for row in rows if log2_elements <= row[0]), rows[-1])[1:])
        transposes = "transpose" in kind or kind.startswith("cast_lines")
        return chosen._replace(tile_r=max(chosen.tile_r, PADDING)) if transposes else chosen

    @staticmethod
    @contextmanager
    def using(rows: Mapping[str, Sequence[Sequence[Any]]]) -> Iterator[None]:
        """Choose configurations of these kinds by other rows than the table's."""
        old_rows = dict(TABLE)
        TABLE.update(rows)  # type: ignore[arg-type]
        _forget_choices()
        try:
            yield
        finally:
            TABLE.clear()  # a kind may have had no row
            TABLE.update(old_rows)
            _forget_choices()


def checked(kind: str, rows: list[list[int]]) -> list[list[int]]:
    """Return a kind's rows. Raise ValueError or TypeError if they are none."""
    length = 1 + len(Config._fields)
    if not rows or not all(len(row) == length and all(type(n) is int and n > 0 for n in row) for row in rows):
        raise ValueError(f"{rows} are no rows of a table of configurations of {kind}")
    return rows


_TABLE = TileTable.read(TileTable.tuned_file())
TABLE = _TABLE.configs
config = functools.cache(_TABLE.config)
LARGE = 64  # log2 of elements, in place of a size: takes a kind's last row

# the products that torch's own scaled product makes: here, and by the shipped table
LIBRARY, SHIPPED_LIBRARY = _TABLE.library, TileTable.read(None).library


def _forget_choices() -> None:
    """Have later calls look configurations up anew, and record their launches anew."""
    config.cache_clear()
    REPLAYS.clear()


def with_room_for(chosen: Config, *blocks: Sequence[int]) -> Config:
    """Return a configuration whose tile holds whole blocks of these (rows, columns), with warps to suit, up to 16."""
    tile_r = max(chosen.tile_r, *(rows for rows, _ in blocks))
    tile_c = max(chosen.tile_c, *(cols for _, cols in blocks))
    larger = tile_r * tile_c // (chosen.tile_r * chosen.tile_c)
    return Config(tile_r, tile_c, chosen.depth, min(16, chosen.num_warps * larger))


def as_argument(scale_inv: Tensor) -> Tensor:
    """Return scale_inv as kernels take it: of E8M0 the bytes, for Triton has no such dtype (3.7)."""
    return scale_inv.view(torch.uint8) if scale_inv.dtype is E8M0 else scale_inv


WHOLE = 1 << 30  # a block of so many rows or columns holds them all


def block_size(size: int) -> int:
    """Return a block's rows or columns as kernels divide by them: WHOLE for ALL."""
    return WHOLE if size == ALL else size


@functools.cache
def multiprocessors(device_index: int) -> int:
    """Return how many multiprocessors a CUDA device has; 0 for index -1, a CPU's."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count if device_index >= 0 else 0


WORK = 1 << 16  # int32 a stream: amaxes that programs share, of rows and columns too, and counters
# workspaces in use, by device, stream, and whether a CUDA graph is captured on it, and those for later, by device; none
# is ever freed, as launches under way and CUDA graphs use them
_work: dict[tuple[int, int, bool], Tensor] = {}
_pools: dict[int, list[Tensor]] = {}
_POOL, _FEW = 32, 8  # how many are added to a pool at once, where fewer than so many are left


@repeatable
def workspace(x: Tensor, size: int) -> Tensor:
    """Return int32 zeros for one launch on the current stream, which leaves them zero again.

    Launches on a stream follow each other, so each stream has one workspace and no launch clears it. Launches captured
    on the stream have another: torch hands out 32 streams in turn, and a graph may be replayed beside launches on the
    stream that it was captured on. Workspaces are made and cleared many at once, outside any CUDA graph: by any launch
    there, also on a stream that has its own, so that later captures find some.

    Raises:
        RuntimeError: if no launch since the last _FEW captures on new streams was outside a graph capture.
    """
    if size > WORK:
        return torch.zeros(size, dtype=torch.int32, device=x.device)
    index = x.get_device()
    captures = index >= 0 and torch.cuda.is_current_stream_capturing()
    key = index, current_raw_stream(index) if index >= 0 else 0, captures
    pool = _pools.setdefault(index, [])
    if len(pool) < _FEW and not captures:
        pool += torch.zeros(_POOL, WORK, dtype=torch.int32, device=x.device).unbind()
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)  # other streams will use the pool
    if key not in _work:
        if not pool:
            raise RuntimeError("run the step once before capturing it in a CUDA graph: octavo's scratch is made there")
        _work[key] = pool.pop()
    return _work[key]


@repeatable
def launch(
    kernel: Any, programs: int, arguments: Sequence[Any], num_warps: int, fuses: bool = False, stages: int | None = None
) -> Any:
    """Launch a kernel, whose constants come last, where its first tensor lies, which must be the current device.

    A replay leaves out Triton's search for the compiled kernel, which this returns. ``fuses``: multiply-adds.
    """
    options = {} if stages is None else {"num_stages": stages}
    return kernel[(programs,)](*arguments, num_warps=num_warps, enable_fp_fusion=fuses, **options)


def is_capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph, which will read its arguments again."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel so that it launches on its first argument's device, whatever the current one is."""

    @functools.wraps(kernel)
    def call(x: Tensor | Sequence[Tensor], *args: Any, **named: Any) -> Any:
        first = x if isinstance(x, Tensor) else next(iter(x), None)
        if first is not None and first.is_cuda and first.get_device() != current_device():
            with torch.cuda.device(first.device):
                return kernel(x, *args, **named)
        return kernel(x, *args, **named)

    return call
