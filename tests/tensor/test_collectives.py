import pytest
import torch
import torch.distributed as dist

from octavo.tensor.collectives import check_ranks_agree, gathered_parts, pack_message, sending_device, unpack_message


def gathered(mesh):
    part = torch.full((3,), 10 + dist.get_rank(), dtype=torch.uint8)
    return gathered_parts(part, 2, mesh.get_group().group_name).tolist()


def test_parts_lie_in_the_order_of_ranks(pool):
    assert pool.run(gathered, (2,)) == [[10, 10, 10, 11, 11, 11]] * 2


def compared(mesh):
    settings = [("seed", 0), ("format", "E4M3")]
    check_ranks_agree(dict(settings if dist.get_rank() else reversed(settings)), mesh.get_all_groups())


def test_ranks_that_name_their_settings_in_another_order_agree(pool):
    pool.run(compared, (2,), seconds=60)


def test_tensors_are_sent_from_where_the_backend_sends(monkeypatch):
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: gpu)
    for backend, device in (("cpu:gloo,cuda:nccl", torch.device("cpu")), ("cuda:nccl", gpu)):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, backend=backend: backend)
        assert sending_device(None) == device


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("rows", [5, 1])
def test_a_message_holds_a_pair(power_of_two, rows):
    codes = torch.randint(256, (rows, 7), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale_inv = torch.exp2(torch.randint(-126, 127, (2, rows)).float().t()) * (1 if power_of_two else 1.25)
    message = pack_message(codes, scale_inv, power_of_two)
    assert message.shape == (rows, 7 + (2 if power_of_two else 8))
    unpacked, scales = unpack_message(message, 7, torch.float8_e4m3fn, power_of_two)
    assert torch.equal(unpacked.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(scales, scale_inv)
