"""
bench.py traffic: bytes that a compiled training step moves through a GPU's memory, and its kernel launches. No GPU needed.

    python bench.py traffic

The step is compiled by Inductor for a CUDA device that is not there (fake_cuda.py). Of the kernels that it generates we count
what it counts itself: each buffer that a kernel reads or writes, once. Our own kernels are opaque to it. So they are called on
tensors without memory, and what they are launched with is counted. The same model with torch's LayerNorm and cross entropy
stands beside.

fwd, bwd: forward and backward pass; clipping and update are the same in all.
"""

import contextlib
import copy
import functools
import sys
import time
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

import ln_kernel
import per_example
from benchmarks import fake_cuda
from benchmarks.tools import BENCH, write_json
from model import GPT, GPTConfig
from trainer import head_loss

SHAPE = dict(n_layer=2, n_head=12, n_embd=768, block_size=2048, vocab_size=50257)   # five norm layers of gpt_111m
MICRO = 8
VARIANTS = {
    "torch": dict(mode=None, norm_impl="torch", plain_head=True),
    "torch's norm, our head": dict(mode=None, norm_impl="torch"),
    "off": dict(mode=None), "norm": dict(mode="norm"), "norm + adam": dict(mode="norm", adam=True),
    "exact": dict(mode="exact"), "exact + adam": dict(mode="exact", adam=True)}
PASSES = {("cross_entropy_kernel", "logits"): 3}   # read, read and written; every other argument is moved once
NO_KERNEL = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh")
FILLED = ("new_zeros", "zeros_like", "new_ones", "ones_like", "new_full", "full_like")


def arguments(parser):
    parser.add_argument("--out", default="results/traffic.json")


# ---- our own operations

class Traffic(TorchDispatchMode):
    """Kernels that torch's operations would launch, as (name, bytes)."""

    def __init__(self):
        super().__init__()
        self.kernels = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view and func.overloadpacket.__name__ not in NO_KERNEL:
            filled = func.overloadpacket.__name__ in FILLED   # with a constant: it looks at its argument's dtype alone
            leaves = tree_leaves(out if filled else (args, kwargs, out))
            own = {id(t): t for t in leaves if isinstance(t, torch.Tensor)}
            self.kernels.append((func.overloadpacket.__name__, sum(map(size, own.values()))))
        return out


def size(tensor):
    return tensor.numel() * tensor.element_size()


def launched_bytes(launched):
    return sum(PASSES.get((launched.name, name), 1) * size(value) for name, value in launched.arguments.items()
               if isinstance(value, torch.Tensor))


def own_kernels(function, values, launches):
    """(name, bytes) of each kernel of one of our operations, on tensors like these."""
    def like(value):
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    before = len(launches)
    with torch.no_grad(), FakeTensorMode(), Traffic() as traffic:
        function(*tree_map(like, values))
    return traffic.kernels + [(launch.name, launched_bytes(launch)) for launch in launches[before:]]


def operations():
    """{name of an operation in a graph: the function behind it}"""
    found = [op for module in (ln_kernel, per_example, head_loss) for op in vars(module).values()
             if isinstance(op, torch.library.CustomOpDef)]
    return {op._qualname: op._init_fn for op in found}


# ---- Inductor's

def generated_kernels(gm, inputs, backward):
    """(name, bytes) of each kernel that Inductor makes of a graph, our operations left out; and the code that calls them."""
    from torch._inductor import compile_fx, ir
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
    from torch._inductor.virtualized import V
    fake_mode = torch._guards.detect_fake_mode(inputs)
    with V.set_fake_mode(fake_mode), fake_mode, torch.no_grad():
        compile_fx.view_to_reshape(gm)
        compile_fx.fake_tensor_prop(gm, inputs)
        compile_fx._recursive_record_original_output_strides(gm)
        compile_fx._recursive_post_grad_passes(gm, is_inference=False)
        graph = GraphLowering(gm, example_inputs=inputs, shape_env=fake_mode.shape_env, is_backward=backward)
        graph.freeze_runtime_asserts()
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]), V.set_debug_handler(DebugContext()):
            graph.run(*inputs)
            code = graph.codegen()[0].value
            kernels = []
            for node in graph.scheduler.nodes:
                inner = node.node if isinstance(node, ExternKernelSchedulerNode) else None
                if isinstance(node, NopKernelSchedulerNode) or isinstance(inner, ir.MultiOutput):
                    continue
                op = getattr(inner, "op_overload", None)
                if op is None or op.namespace != "rightbatch":
                    name = getattr(inner, "python_kernel_name", None) or node.get_name()
                    kernels.append((str(name), node.get_read_write_buffers_sizes()))
    return kernels, code


def compiler(found, launches):
    """A backend for torch.compile that counts what Inductor makes of the forward and the backward graph, and runs neither."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def inner(gm, inputs, is_backward=False, **_):
        ours, functions = [], operations()
        with _disable_current_modes():
            for node in gm.graph.nodes:
                if getattr(node.target, "namespace", None) == "rightbatch":
                    values = tree_map(lambda a: a.meta["val"] if isinstance(a, torch.fx.Node) else a, node.args)
                    ours += own_kernels(functions[node.target._schema.name], values, launches)
            kernels, code = generated_kernels(copied(gm), inputs, is_backward)
        found["bwd" if is_backward else "fwd"] = {"generated": kernels, "own": ours, "code": code}
        return make_boxed_func(gm)
    return functools.partial(compile_fx, inner_compile=inner)


def copied(gm):
    """Inductor changes the graph that it is given."""
    return torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))


# ---- a step

def step_kernels(shape, micro, mode=None, adam=False, norm_impl="auto", plain_head=False):
    """{"fwd" and "bwd": {"generated", "own": [(name, bytes)], "code"}} of one compiled step."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    found = {}
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        launches = stack.enter_context(fake_cuda.pretended(compiling=True))
        stack.enter_context(fake_cuda.triton_driver(80))
        # what would ask the device: caches, a race between products with and without padding, constants, patterns of attention
        stack.enter_context(inductor_config.patch(fx_graph_cache=False, shape_padding=False,
                                                  joint_graph_constant_folding=False))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True))
        stack.enter_context(mock.patch("torch._inductor.fx_passes.joint_graph.lazy_init", lambda device: None))
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", flash))
        if plain_head:
            stack.enter_context(mock.patch.object(head_loss, "WORTH_BYTES", float("inf")))
        with torch.device("cuda"):
            model = GPT(GPTConfig(**shape, norm_impl=norm_impl))
            x, y = (torch.zeros(micro, shape["block_size"], dtype=torch.int64) for _ in range(2))
            given = {}
            if mode:
                sites = model.probe_sites(mode)
                given["probes"] = torch.zeros(len(sites), 4 if adam else 2, micro, requires_grad=True)
                if adam:
                    given["metrics"] = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        run = torch.compile(model, fullgraph=True, backend=compiler(found, launches))
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(x, y, **given)[1]
        loss.backward()
    return found


def flash(q, k, v, is_causal, dropout_p):
    """What torch takes on a GPU, where it asks the device, which is not there."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


def totals(found):
    """Bytes and launches of a step, and our share of them."""
    kernels = [kernel for part in found.values() for kernel in part["generated"] + part["own"]]
    own = [kernel for part in found.values() for kernel in part["own"]]
    return {"gigabytes": round(sum(b for _, b in kernels) / 1e9, 3), "launches": len(kernels),
            "own_gigabytes": round(sum(b for _, b in own) / 1e9, 3), "own_launches": len(own)}


def run(args):
    if not fake_cuda.here():
        return fake_cuda.inside(BENCH, *sys.argv[1:])
    rows = []
    print("{:26}{:>12}{:>10}{:>14}{:>14}".format("step", "GB", "launches", "GB, ours", "launches, ours"))
    for name, options in VARIANTS.items():
        began = time.perf_counter()
        rows.append({"step": name, **totals(step_kernels(SHAPE, MICRO, **options))})
        print("{:26}{:12.2f}{:10}{:14.2f}{:14}".format(*rows[-1].values()), f"{time.perf_counter() - began:.0f} s", flush=True)
    write_json(args.out, {"model": SHAPE, "micro_batch": MICRO, "steps": rows})
