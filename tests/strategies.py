"""Random problems for hypothesis, over the same options as the grid."""

from __future__ import annotations

from hypothesis import strategies as st

from fused_rope_xattn.verify.cases import OPTIONS, Case, normalised

HEADS = ((1, None), (2, None), (3, 1), (4, 2), (6, 3), (8, None))


@st.composite
def problems(draw: st.DrawFn, largest: int = 80, dtypes: tuple[str, ...] = ("fp32",)) -> Case:
    """A valid Case of random sizes up to ``largest`` tokens; sizes shrink towards 1."""
    choice = {
        name: draw(st.sampled_from(values), label=name)
        for name, values in OPTIONS.items()
        if name not in ("sizes", "heads", "D")
    }
    tokens = st.integers(1, largest)
    # A query that sees one key has score gradients of 0 in exact arithmetic, where a ratio of
    # errors says nothing: some keys must survive the masks. The properties cover the rest.
    choice["sizes"] = draw(st.tuples(st.integers(1, 4), tokens, st.integers(8, largest)))
    choice["heads"] = draw(st.sampled_from(HEADS))
    choice["D"] = draw(st.sampled_from((8, 15, 16, 24, 30, 32, 40, 64, 72, 80, 96, 128, 136, 256)))
    choice["scale"] = draw(st.sampled_from((None, 0.37, 0.02, -0.2)))
    choice["dropout_p"] = draw(st.sampled_from((0.0, 0.0, 0.1, 0.5, 0.9)))
    case = normalised(choice, "random")
    return case.at(draw(st.sampled_from(dtypes)))
