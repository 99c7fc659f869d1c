import pytest
import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from octavo import PerBlock, PerTensor, UnsupportedOpError
from octavo.weights.bucket import BroadcastBucket
from octavo.weights.stored import StoredWeight


def parameters():
    values = [torch.randn(shape) for shape in ((130, 40), (7,), (3, 20, 16), (256, 256))]
    granularities = [PerTensor(), None, PerTensor(), PerBlock(128, 128)]
    return [
        nn.Parameter(one if how is None else StoredWeight.cast(one, how, keep_extra_bits=True))
        for one, how in zip(values, granularities, strict=True)
    ]


def equal(weights, others):
    pairs = zip(weights, others, strict=True)
    return all(a.equals(b) if isinstance(a, StoredWeight) else torch.equal(a, b) for a, b in pairs)


def test_parameters_go_to_the_bucket_that_is_broadcast_and_back():
    weights = parameters()
    for some in (weights, weights[:1]):  # DistributedDataParallel joins them by these C++ functions
        bucket = _flatten_dense_tensors([weight.detach() for weight in some])
        assert isinstance(bucket, BroadcastBucket)
        copies = [weight.detach().clone() for weight in some]
        pieces = _unflatten_dense_tensors(bucket, copies)
        with torch.no_grad():
            for copied, piece in zip(copies, pieces, strict=True):
                copied.zero_()
                copied.copy_(piece)
        assert equal(copies, some)


def test_a_bucket_of_several_is_viewed_as_the_vector_that_it_is():
    weights = parameters()
    bucket = _flatten_dense_tensors([weight.detach() for weight in weights])
    for size in ((-1,), bucket.shape):
        assert equal([piece.view(w.shape) for piece, w in zip(bucket.view(size).pieces, weights, strict=True)], weights)
    with pytest.raises(UnsupportedOpError, match="of a vector of parameters"):
        bucket.view(2, -1)


def test_a_vector_of_parameters_names_the_way_to_make_one():
    weights = parameters()
    vector = parameters_to_vector(weights)
    for use in (torch.sin, lambda flat: flat[5:], lambda flat: flat.copy_(torch.zeros(flat.shape))):
        with torch.no_grad(), pytest.raises(UnsupportedOpError, match=r"of a vector of parameters.*dequantize\(\) for"):
            use(vector)
    values = parameters_to_vector(weight.dequantize() for weight in weights).split([w.numel() for w in weights])
    for weight, value in zip(weights, values, strict=True):
        plain = weight.pair().dequantize() if isinstance(weight, StoredWeight) else weight
        assert torch.equal(value.view(weight.shape), plain)
    with pytest.raises(UnsupportedOpError, match=r"weight.data = \.\.\."):
        vector_to_parameters(torch.zeros(vector.shape), weights)
