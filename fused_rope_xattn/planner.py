"""Which path a call takes, and why."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from . import _loader, fused, grouped, split, token_attention
from .arguments import Arguments
from .prepare import Prepared, prepare
from .rules import show
from .split import BlockTensors, Projection

LARGEST_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8

# Any other subclass of Tensor may mean anything by its operators, which only plain ones reach.
PLAIN_TENSORS = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor, type(None))


@dataclass(frozen=True)
class GPU:
    """A GPU to plan for."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int

    @classmethod
    def current(cls) -> GPU:
        """The current CUDA device, or an H200 where there is none."""
        if not torch.cuda.is_available():
            return cls("NVIDIA H200", (9, 0), 132)
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return cls(found.name, (found.major, found.minor), found.multi_processor_count)


class Choice(NamedTuple):
    """The path of a call, and the reason for it."""

    path: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """What a call runs: the path, the reason for it, and the kernels of a forward in order."""

    path: str
    reason: str
    kernels: tuple[str, ...]

    def __str__(self) -> str:
        steps = "".join(f"\n  {i}. {kernel}" for i, kernel in enumerate(self.kernels, 1))
        return f"{self.path}: {self.reason}{steps}"


def plan(*args: Any, gpu: GPU | None = None, **kwargs: Any) -> Plan:
    """What ``cross_attention(*args, **kwargs)`` would run, without running it.

    Needs no GPU. Tensors may be on the meta device, which stands for ``gpu``; CPU tensors do too
    where ``gpu`` is given. Its default is the current GPU, or an H200 where there is none. Raises
    what the call would raise.
    """
    from .functional import cross_attention  # which itself needs this module

    if not (gpu is None or isinstance(gpu, GPU)):
        raise TypeError(f"gpu: expected a GPU or None, got {show(gpu)}")
    bound = inspect.signature(cross_attention).bind(*args, **kwargs)
    bound.apply_defaults()
    prepared = prepare(Arguments(**bound.arguments))
    if gpu is None and prepared.problem.device.type == "meta":
        gpu = GPU.current()
    path, reason = choose(prepared, bound.arguments["path"], gpu)
    kernels: tuple[str, ...] = ("PyTorch's own operators",)
    if path == "fused":
        inputs = "q" if prepared.tensors.w_k is None else "q k v"
        kernels = (f"block_projection {inputs}", "block_attention")
        if prepared.tensors.w_out is not None:
            kernels += ("block_projection out",)
    elif path == "split":
        kernels = _split_kernels(prepared, gpu or GPU.current())
    return Plan(path, reason, kernels)


def choose(
    prepared: Prepared,
    path: str,
    gpu: GPU | None = None,
    known: dict[tuple[str, bool], Choice] | None = None,
) -> Choice:
    """The path of a checked call and the reason for it; ValueError if ``path`` is impossible.

    ``gpu`` None means the device that the tensors are on. ``known`` holds the choices of calls with
    the same signature, and gets this one: nothing but :func:`_passing_obstacle` may look at more.
    """
    obstacle = _passing_obstacle(prepared.tensors)
    if obstacle is not None or known is None:
        return _choose(prepared, path, _lasting_obstacle(prepared, gpu) or obstacle)
    key = path, prepared.config.tf32
    choice = known.get(key)
    if choice is None:
        choice = known[key] = _choose(prepared, path, _lasting_obstacle(prepared, gpu))
    return choice


def _choose(prepared: Prepared, path: str, obstacle: str | None) -> Choice:
    """``obstacle``: why the kernels cannot take the call."""
    if path == "composite":
        return Choice("composite", "it was asked for")
    refusal = obstacle or fused.obstacle(*prepared)
    if path == "fused" and refusal is not None:
        raise ValueError(f"path: 'fused' cannot be taken: {refusal}; use path='auto' or 'split'")
    if path == "split" and obstacle is not None:
        raise ValueError(f"path: 'split' cannot be taken: {obstacle}; use path='auto'")
    if obstacle is not None:
        return Choice("composite", obstacle)
    if path == "fused":
        return Choice("fused", "it was asked for")
    if path == "auto" and refusal is None and fused.pays(*prepared):
        return Choice("fused", "small: three short kernels, chained")
    return Choice("split", "the kernels cover this problem")


def kernels_missing(device: torch.device) -> str | None:
    """Why the compiled kernels cannot run on a CUDA device, None if they can."""
    problem: str | None = _kernels_missing(device.index)
    return problem


@torch.compiler.assume_constant_result
def _kernels_missing(index: int | None) -> str | None:
    return _loader.why_unavailable(index)


_told: set[str] = set()


@torch.compiler.assume_constant_result  # so that a compiled call warns as well, when it is traced
def warn_once(message: str) -> None:
    if message not in _told:
        _told.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _lasting_obstacle(prepared: Prepared, gpu: GPU | None) -> str | None:
    """Why the kernels cannot take any call with this one's signature, None if they can."""
    problem = prepared.problem
    if problem.dtype == torch.float64:
        return "fp64 is computed by PyTorch's own operators"
    if problem.D % HEAD_DIM_MULTIPLE or problem.D > LARGEST_HEAD_DIM:
        return (
            f"the kernels take head dims that are multiples of {HEAD_DIM_MULTIPLE} "
            f"up to {LARGEST_HEAD_DIM}, not {problem.D}"
        )
    return _device_obstacle(problem.device, gpu) or _subclass_obstacle(prepared.tensors)


def _device_obstacle(device: torch.device, gpu: GPU | None) -> str | None:
    if gpu is not None:
        if gpu.compute_capability >= _loader.OLDEST_CAPABILITY:
            return None
        wanted = ".".join(map(str, _loader.OLDEST_CAPABILITY))
        return f"{gpu.name} is older than compute capability {wanted}"
    if device.type != "cuda":
        return f"the tensors are on {device}"
    return kernels_missing(device)


def _subclass_obstacle(t: BlockTensors) -> str | None:
    for x in t:
        if type(x) not in PLAIN_TENSORS:
            return f"an argument is a {type(x).__name__}"
    return None


def _passing_obstacle(t: BlockTensors) -> str | None:
    """Why the kernels cannot take this call just now, None if they can."""
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is active"
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in t
    ):
        return "an argument carries a forward-mode tangent"
    if torch.is_grad_enabled():
        turning = (t.q_positions, t.q_cos, t.q_sin, t.k_positions, t.k_cos, t.k_sin)
        if any(x is not None and x.requires_grad for x in turning):
            return "cos, sin or positions require grad"
    return None


def _split_kernels(prepared: Prepared, gpu: GPU) -> tuple[str, ...]:
    config, t = prepared.config, prepared.tensors
    is_hopper = gpu.compute_capability == grouped.CAPABILITY
    over_tokens = is_hopper and token_attention.obstacle(config, t) is None
    every: tuple[Projection, ...] = (
        split.query_projection(config, t),
        split.key_projection(config, t),
    )
    if not over_tokens:
        every += (split.value_projection(config, t),)
    taken = tuple(is_hopper and grouped.obstacle(p) is None for p in every)
    chosen = dict(zip("qkv", grouped.select(every, taken), strict=False))
    steps = [" ".join(["project_group", *(name for name in chosen if chosen[name])])]
    if not any(chosen.values()):
        steps = []
    for name, p in zip("qkv", every, strict=False):
        if p.weight is None or chosen[name]:
            continue
        steps.append(f"gemm {name}")
        if not p.is_plain:
            steps.append(f"norm_rope {name}")
    if is_hopper and config.tf32 and not chosen.get("v", False):  # else the group writes both
        sizes = prepared.problem
        if grouped.tf32_pays(sizes.B, sizes.H, sizes.Tq, sizes.Tk, sizes.D):
            steps.append("transpose_heads v")
    steps += ["token_sums", "token_values"] if over_tokens else ["attention_forward"]
    if t.w_out is not None:
        sizes = prepared.problem
        o = t.w_out.new_empty(sizes.B, sizes.Tq, sizes.H, sizes.D, device="meta")
        out = split.output_projection(config, t, o)
        taken_out = is_hopper and grouped.output_obstacle(out) is None
        steps.append("project_group out" if taken_out else "gemm out")
    return tuple(steps)
