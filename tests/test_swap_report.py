"""The walk over a model: what it recognises, refuses, tells, and takes back."""

from __future__ import annotations

import copy
import io
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused_rope_xattn
from fused_rope_xattn import cross_attention
from fused_rope_xattn.swap import (
    Adapter,
    Draw,
    Place,
    Refused,
    Unserved,
    register_adapter,
    swap_cross_attention,
    unswap,
)
from reference_models import CrocoDecoder, CrossAttention, MemoryAttention, RoPE2D
from swap_models import counted_calls

E = 32


class Mixed(nn.Module):
    """Attentions of several kinds, one of them under two names, and one that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_attn = nn.MultiheadAttention(E, 4, batch_first=True)
        self.again = self.cross_attn
        self.self_attn = nn.MultiheadAttention(E, 4, batch_first=True)
        self.croco = CrossAttention(E, RoPE2D(), 2)
        self.own = Own()

    def forward(self, x: Tensor, kv: Tensor) -> Tensor:
        x = x + self.cross_attn(x, kv, kv, need_weights=False)[0]
        x = x + self.self_attn(x, x, x, need_weights=False)[0]
        x = x + self.croco(x, kv, kv, None, None)
        return self.own(x, kv) + self.again(x, kv, kv, need_weights=False)[0]


class Own(nn.Module):
    """An attention with names of its own, scaled and with a mask of its own meaning."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(E, E) for _ in range(3))
        self.out = nn.Linear(E, E)
        self.temperature = temperature

    def forward(self, x: Tensor, context: Tensor, hidden: Tensor | None = None) -> Tensor:
        q, k, v = (
            linear(t).unflatten(-1, (4, -1)).transpose(1, 2)
            for linear, t in ((self.query, x), (self.key, context), (self.value, context))
        )
        scores = q @ k.transpose(-2, -1) / self.temperature
        if hidden is not None:
            scores = scores.masked_fill(hidden[:, None, None].bool(), -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class OwnAdapter(Adapter):
    """As a user would write it."""

    kind = "my own attention"
    classes = (Own,)
    children = ("query", "key", "value", "out")

    def examine(self, module: Any, place: Place) -> None:
        if module.temperature <= 0:
            raise Refused("its temperature is not positive")

    def forward(self, module: Any, x: Tensor, context: Tensor, hidden: Tensor | None = None) -> Any:
        if hidden is not None and hidden.dtype != torch.bool:
            return Unserved("its mask is not boolean")
        return cross_attention(
            x,
            context,
            module.query.weight,
            module.key.weight,
            module.value.weight,
            module.out.weight,
            num_heads=4,
            b_q=module.query.bias,
            b_k=module.key.bias,
            b_v=module.value.bias,
            b_out=module.out.bias,
            rope=None,
            kv_keep_mask=None if hidden is None else ~hidden,
            scale=1.0 / module.temperature,
        )

    def probe(self, module: Any, draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (draw.normal(2, 5, E), draw.normal(2, 7, E)), {}


@pytest.fixture
def _own_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    from fused_rope_xattn.swap import registry

    for name in ("_by_class", "_by_kind"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    register_adapter(OwnAdapter)


def tokens() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 5, E), torch.randn(2, 7, E)


# ------------------------------------------------------------------------------------- the report


def test_report_is_a_table() -> None:
    model = Mixed()
    report = swap_cross_attention(model, verify=True)
    outcome = {e.path: (e.swapped, e.why) for e in report}
    assert outcome == {
        "cross_attn": (True, "the same formula"),
        "self_attn": (False, "self-attention"),
        "croco": (True, "the same formula"),
        "own": (False, "no adapter for its class"),
    }
    lines = str(report).splitlines()
    assert lines[0] == "2 of 4 attentions run on fused_rope_xattn"
    assert lines[2].split() == ["module", "kind", "probe", "differs", "by", "why"]
    assert len(lines) == 8
    assert "test_swap_report.Own" in lines[-1]
    assert len(report) == 4
    assert len(report.swapped) == len(report.left_alone) == 2
    assert str(swap_cross_attention(nn.Linear(2, 2))).startswith("0 of 0")


def test_swapping_twice_changes_nothing() -> None:
    model = Mixed()
    swap_cross_attention(model)
    second = swap_cross_attention(model)
    assert [e.why for e in second if e.path in ("cross_attn", "croco")] == [
        "it is swapped already"
    ] * 2
    assert not second.swapped


def test_one_module_under_two_names_is_one_module() -> None:
    model = Mixed()
    swap_cross_attention(model)
    with counted_calls() as calls:
        model(*tokens())
    assert len(calls) == 3
    assert model.again is model.cross_attn


@pytest.mark.parametrize(
    "paths, swapped",
    [
        ("*cross*", ["cross_attn"]),
        (["self_attn"], ["self_attn"]),
        (["*_attn", "croco"], ["cross_attn", "self_attn", "croco"]),
    ],
)
def test_paths(paths: Any, swapped: list[str]) -> None:
    model = Mixed()
    x, kv = tokens()
    want = model(x, kv)
    report = swap_cross_attention(model, paths=paths)
    assert [e.path for e in report.swapped] == swapped
    torch.testing.assert_close(model(x, kv), want)


def test_paths_that_name_nothing() -> None:
    with pytest.raises(ValueError, match="paths: no attention found at nowhere"):
        swap_cross_attention(Mixed(), paths=["croco", "nowhere"])


def test_public_name() -> None:
    assert fused_rope_xattn.swap_cross_attention is swap_cross_attention


def test_no_library_of_models_is_imported() -> None:
    code = (
        "import sys, torch, fused_rope_xattn as f\n"
        "f.swap_cross_attention(torch.nn.Transformer(8, 2, 1, 1, 8))\n"
        "assert not {'transformers', 'diffusers', 'x_transformers', 'einops'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -------------------------------------------------------------------------------- what is refused


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Quantised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.weight * 8).round() / 8, self.bias)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


def _lora(module: Any) -> None:
    module.projk = Lora(module.projk)


def _quantised(module: Any) -> None:
    module.projv = Quantised(E, E)


def _hook(module: Any) -> None:
    module.projq.register_forward_hook(lambda m, args, out: 2.0 * out)


def _parametrised(module: Any) -> None:
    nn.utils.parametrize.register_parametrization(module.proj, "weight", Doubled())


def _patched(module: Any) -> None:
    own = module.forward
    module.forward = lambda *args: 2.0 * own(*args)


CHANGES: dict[str, tuple[Any, str]] = {
    "lora": (_lora, "projk is a Lora"),
    "quantised": (_quantised, "projv is a Quantised"),
    "hook": (_hook, "projq has hooks"),
    "parametrised": (_parametrised, "proj is a ParametrizedLinear"),
    "patched": (_patched, "its forward was replaced on the instance"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_modules_are_refused(change: str) -> None:
    module = CrossAttention(E, RoPE2D(), 2)
    CHANGES[change][0](module)
    (entry,) = swap_cross_attention(module)
    assert not entry.swapped
    assert entry.why == CHANGES[change][1]


@pytest.mark.parametrize("change", ["lora", "quantised", "hook", "parametrised"])
def test_changes_after_the_swap_are_honoured(change: str) -> None:
    module = CrossAttention(E, RoPE2D(), 2)
    x, kv = tokens()
    plain = module(x, kv, kv, None, None)
    swap_cross_attention(module)
    CHANGES[change][0](module)
    twin = copy.deepcopy(module)
    unswap(twin)
    want = twin(x, kv, kv, None, None)
    with counted_calls() as calls, pytest.warns(RuntimeWarning, match=CHANGES[change][1]):
        got = module(x, kv, kv, None, None)
    assert not calls
    assert torch.equal(got, want)
    assert float((got - plain).detach().abs().max()) > 1e-3


def test_parametrised_attention_is_refused() -> None:
    module = nn.MultiheadAttention(E, 4)
    nn.utils.parametrize.register_parametrization(module, "in_proj_weight", Doubled())
    (entry,) = swap_cross_attention(module, paths="*")
    assert entry.why == "it is parametrised"


class Renamed(nn.MultiheadAttention):
    """A subclass that changes nothing."""


class Scaled(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y, weights = super().forward(*args, **kwargs)
        return 2.0 * y, weights


def test_subclasses() -> None:
    renamed, scaled = swap_cross_attention(
        nn.ModuleDict({"cross_attn": Renamed(E, 4), "cross_attn2": Scaled(E, 4)})
    )
    assert renamed.swapped
    assert scaled.why == "its subclass Scaled redefines forward"


def test_tolerance() -> None:
    model = MemoryAttention(E)
    report = swap_cross_attention(model, tolerance=0.0)
    assert not report.swapped
    assert all("the probe differs by" in e.why or e.why == "self-attention" for e in report)
    assert unswap(model) == 0


# -------------------------------------------------------------------------------- what is kept


def test_hooks_of_the_attention_itself_still_run() -> None:
    module, seen = CrossAttention(E, RoPE2D(), 2), []
    module.register_forward_pre_hook(lambda m, args: seen.append("before"))
    module.register_forward_hook(lambda m, args, out: seen.append("after"))
    assert swap_cross_attention(module).swapped
    assert not seen
    x, kv = tokens()
    module(x, kv, kv, None, None)
    assert seen == ["before", "after"]


def test_isinstance_signature_and_attributes_stay() -> None:
    import inspect

    module = nn.MultiheadAttention(E, 4, batch_first=True)
    before = inspect.signature(module.forward)
    swap_cross_attention(module, paths="*")
    assert isinstance(module, nn.MultiheadAttention)
    assert inspect.signature(module.forward) == before
    assert (module.embed_dim, module.num_heads, module.batch_first) == (E, 4, True)
    assert repr(module).startswith("SwappedMultiheadAttention")


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch.save"])
def test_copies_stay_swapped(copied: str) -> None:
    model = Mixed()
    swap_cross_attention(model)
    x, kv = tokens()
    if copied == "deepcopy":
        twin = copy.deepcopy(model)
    elif copied == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        twin = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    with counted_calls() as calls:
        assert torch.equal(twin(x, kv), model(x, kv))
    assert len(calls) == 6
    assert twin.cross_attn.in_proj_weight is not model.cross_attn.in_proj_weight
    assert unswap(twin) == 2
    assert type(twin.croco) is CrossAttention
    assert type(model.croco) is not CrossAttention


def test_state_dict_goes_back_to_the_original() -> None:
    """Trained while swapped, then loaded by a model that knows nothing of swaps."""
    model, fresh = CrocoDecoder(E), CrocoDecoder(E)
    swap_cross_attention(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, kv = tokens()
    where = [torch.randint(0, 9, (2, t, 2)) for t in (5, 7)]
    model(x, kv, *where).square().mean().backward()
    optimizer.step()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(x, kv, *where), model(x, kv, *where))


def test_moves_and_casts_after_the_swap() -> None:
    model = CrocoDecoder(E)
    swap_cross_attention(model)
    model.double()
    x, kv = (t.double() for t in tokens())
    where = [torch.randint(0, 9, (2, t, 2)) for t in (5, 7)]
    got = model(x, kv, *where)
    unswap(model)
    torch.testing.assert_close(got, model(x, kv, *where))


def test_undoing_beneath_a_later_class_change_is_an_error() -> None:
    module = nn.MultiheadAttention(E, 4)
    swap_cross_attention(module, paths="*")
    nn.utils.parametrize.register_parametrization(module, "in_proj_weight", Doubled())
    with pytest.raises(RuntimeError, match="changed once more since"):
        unswap(module)
    nn.utils.parametrize.remove_parametrizations(module, "in_proj_weight")
    assert unswap(module) == 1
    assert type(module) is nn.MultiheadAttention


def test_checkpoint_and_autocast() -> None:
    from torch.utils.checkpoint import checkpoint

    model = CrocoDecoder(E)
    swap_cross_attention(model)
    x, kv = tokens()
    where = [torch.randint(0, 9, (2, t, 2)) for t in (5, 7)]
    want = model(x, kv, *where)
    got = checkpoint(model, x, kv, *where, use_reentrant=False)
    assert torch.equal(got, want)
    got.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        attended = model.blocks[0].cross_attn(x, kv, kv, None, None)
    assert attended.dtype == torch.bfloat16


# ------------------------------------------------------------------------------ adapters of users


@pytest.mark.usefixtures("_own_adapter")
def test_own_adapter() -> None:
    model = Own(temperature=3.0)
    x, kv = tokens()
    hidden = torch.rand(2, 7) < 0.4
    hidden[:, 0] = False
    want = model(x, kv, hidden)
    report = swap_cross_attention(model, verify=True)
    assert [(e.kind, e.swapped) for e in report] == [("my own attention", True)]
    with counted_calls() as calls:
        torch.testing.assert_close(model(x, kv, hidden), want)
    assert len(calls) == 1
    with counted_calls() as calls, pytest.warns(RuntimeWarning, match="is not boolean"):
        torch.testing.assert_close(model(x, kv, hidden.int()), want)
    assert not calls


@pytest.mark.usefixtures("_own_adapter")
def test_own_adapter_refuses() -> None:
    (entry,) = swap_cross_attention(Own(temperature=-1.0))
    assert entry.why == "its temperature is not positive"


@pytest.mark.usefixtures("_own_adapter")
def test_wrong_adapter_is_found_by_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda self, module, x, context, hidden=None: x  # noqa: E731
    monkeypatch.setattr(OwnAdapter, "forward", wrong)
    model = Own()
    (entry,) = swap_cross_attention(model, verify=True)
    assert not entry.swapped
    assert "the probe differs by" in entry.why
    assert type(model) is Own


def test_adapters_need_a_kind_and_classes() -> None:
    with pytest.raises(ValueError, match="expected a kind"):
        register_adapter(Adapter)

    class Nothing(Adapter):
        kind = "nothing"

    with pytest.raises(ValueError, match="expected classes"):
        register_adapter(Nothing)


def test_page_about_adapters() -> None:
    page = Path(__file__).parent.parent / "docs/swap/adapters.md"
    found = re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1], names)
    assert [(e.kind, e.swapped) for e in names["report"]] == [("Look", True)]


def test_adapter_by_a_name() -> None:
    from fused_rope_xattn.swap.registry import find_adapter

    assert find_adapter(nn.MultiheadAttention(8, 2)) is not None
    assert find_adapter(nn.Linear(2, 2)) is None
