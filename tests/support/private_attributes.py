"""The private attributes of torch's instances that octavo reads and writes, and what for."""

from octavo.private import Name

# all rooms use these, as torch's own tutorials do
ANYWHERE = {
    "_version": Name("torch.Tensor._version", "tells whether a tensor was written"),
    "_cdata": Name("torch.UntypedStorage._cdata", "tells storages apart"),
    "_make_wrapper_subclass": Name("torch.Tensor._make_wrapper_subclass", "makes tensors that hold a pair"),
    "_parameters": Name("torch.nn.Module._parameters", "exchanges weights without a module's checks"),
    "_buffers": Name("torch.nn.Module._buffers", "gives back buffers after a trial"),
    "_modules": Name("torch.nn.Module._modules", "finds the parts of a module"),
    "_should_skip_dynamo": Name(
        "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo", "records an op's calls without a compiler"
    ),
    "_schema": Name("torch._ops.OpOverload._schema", "tells views from operations"),
    "_overloadpacket": Name("torch._ops.OpOverload._overloadpacket", "finds an operation's FLOPs"),
    "_opname": Name("torch._ops.OpOverload._opname", "finds octavo's casts in exported programs"),
    "_prepare_input_kwarg_fn": Name(
        "torch.distributed.tensor.parallel.PrepareModuleInput._prepare_input_kwarg_fn", "gathers inputs given by name"
    ),
    "_optimizer_load_state_dict_pre_hooks": Name(
        "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks", "runs users' hooks before a state is loaded"
    ),
    "_optimizer_load_state_dict_post_hooks": Name(
        "torch.optim.Optimizer._optimizer_load_state_dict_post_hooks", "runs users' hooks after a state was loaded"
    ),
}

# the functions of octavo/private.py alone use these
IN_PRIVATE_FILE = {
    "_local_tensor": Name("torch.distributed.tensor.DTensor._local_tensor", "reads this rank's part without a graph"),
    "_backward_hooks": Name("torch.nn.Parameter._backward_hooks", "keeps a parameter's hooks when its tensor changes"),
    "_post_accumulate_grad_hooks": Name("torch.nn.Parameter._post_accumulate_grad_hooks", "the same"),
    "_current_level": Name("torch.autograd.forward_ad._current_level", "refuses forward-mode derivatives"),
    "_is_exporting_flag": Name("torch.compiler._is_exporting_flag", "tells torch.export from torch.compile"),
    "_is_fsdp_managed_module": Name(
        "torch.nn.Module._is_fsdp_managed_module", "keeps no codes of weights that are freed"
    ),
    "_get_fsdp_state": Name("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "finds FSDP2's parameters"),
    "_fsdp_param_groups": Name("FSDPState._fsdp_param_groups", "the same"),
    "_fsdp_param_group": Name("FSDPState._fsdp_param_group", "the same, until torch 2.12"),
    "_module_info": Name("FSDPParam._module_info", "finds the module of an FSDP2 parameter"),
    "_sharded_local_tensor": Name("FSDPParam._sharded_local_tensor", "asks whether a shard is one of octavo's"),
    "_sharded_param_data": Name("FSDPParam._sharded_param_data", "puts another shard into FSDP2"),
    "_unsharded_param": Name("FSDPParam._unsharded_param", "makes FSDP2 forget a gathered weight"),
    "_unsharded_inner_tensors": Name("FSDPParam._unsharded_inner_tensors", "the same"),
    "CUSTOM_EXTERN_KERNEL_CODEGEN": Name(
        "torch._inductor.codegen.custom_extern_kernel_codegen.CUSTOM_EXTERN_KERNEL_CODEGEN",
        "lets what Inductor compiled call kernels without the dispatcher, from torch 2.13 on",
    ),
    "get_default_op_list": Name(
        "torch._functorch.partitioners.get_default_op_list", "tells which operations are dear to compute again"
    ),
}
