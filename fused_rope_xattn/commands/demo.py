"""Trains cross-view completion on photographs, with and without looking at the second view."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ..demo import photographs
from ..demo.model import CompletionModel, completion_loss, hidden_mask, random_visible
from ..demo.photographs import Pairs
from ..demo.picture import write_grid
from ._extras import need

HELP = "train cross-view completion on real photographs and draw the result"

BATCH = 24
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 20
TEST_PAIRS = 128
BETTER_BY = 0.75  # the loss with the second view must be below this share of the loss without
ROWS = 6  # of the picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, help="training steps of each model")
    parser.add_argument(
        "--mask-ratio", type=float, default=0.75, help="share of view 1 to complete"
    )
    parser.add_argument("--output", type=Path, default=Path("completion.png"), help="the picture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(args: argparse.Namespace) -> int:
    need("demo", "rich", "skimage", "PIL")
    device = torch.device(args.device)
    # On a busy machine, threads that wait for each other are slower than fewer of them.
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    started = time.perf_counter()
    training = photographs.load(photographs.TRAINING, photographs.TRAINING_SIDES)
    held_out = photographs.load(photographs.HELD_OUT, photographs.HELD_OUT_SIDES)
    generator = torch.Generator().manual_seed(args.seed + 1)
    test = photographs.sample(held_out, TEST_PAIRS, generator)
    test_visible = random_visible(TEST_PAIRS, args.mask_ratio, generator)
    print(
        f"Complete {args.mask_ratio:.0%} of a crop of {photographs.CROP}x{photographs.CROP} pixels"
        f" from a second crop, up to {photographs.MAX_SHIFT} pixels away.\n"
        "RoPE positions place the tokens of both crops in one plane: the shift is known.\n"
        f"Training photographs: {', '.join(photographs.TRAINING)}.\n"
        f"Held-out photographs: {', '.join(photographs.HELD_OUT)}.\n"
    )

    completed, losses = {}, {}
    for name, sees in (("with cross-attention", True), ("cross-attention cut off", False)):
        model = _train(args, name, sees, training, device)
        completed[name] = _complete(model, test, test_visible, device)
        losses[name] = float(completion_loss(completed[name], test.view_1, test_visible))

    _draw(args.output, test, test_visible, completed)
    return _report(losses, args, time.perf_counter() - started)


def _train(
    args: argparse.Namespace, name: str, sees: bool, training: list[Tensor], device: torch.device
) -> CompletionModel:
    """The same initial weights, crops, masks and steps for both models."""
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = CompletionModel(sees_second_view=sees).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.02
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule(args.steps))
    with _progress(name, args.steps) as advance:
        for _ in range(args.steps):
            pairs = photographs.sample(training, BATCH, generator).to(device)
            visible = random_visible(BATCH, args.mask_ratio, generator).to(device)
            loss = completion_loss(model(pairs, visible), pairs.view_1, visible)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            advance(loss)
    return model


def _schedule(steps: int) -> Callable[[int], float]:
    """A linear rise, then half a cosine."""

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))

    return factor


@contextmanager
def _progress(name: str, steps: int) -> Iterator[Callable[[Tensor], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task(name, total=steps, loss=math.nan)
        taken = 0

        def advance(loss: Tensor) -> None:
            nonlocal taken
            taken += 1
            # Reading the loss waits for the device, so that it is not done at every step.
            if taken % 10 == 0 or taken == steps:
                progress.update(task, completed=taken, loss=loss.item())

        yield advance


@torch.no_grad()
def _complete(
    model: CompletionModel, pairs: Pairs, visible: Tensor, device: torch.device
) -> Tensor:
    """Patches of view 1: as given where visible, as predicted elsewhere."""
    prediction = model(pairs.to(device), visible.to(device)).cpu()
    return torch.where(hidden_mask(visible)[..., None], prediction, pairs.view_1)


def _draw(path: Path, pairs: Pairs, visible: Tensor, completed: dict[str, Tensor]) -> None:
    def shown(patches: Tensor) -> Tensor:
        return photographs.to_images(patches * pairs.deviation + pairs.mean)[:ROWS]

    grey = (0.5 - pairs.mean) / pairs.deviation
    masked = torch.where(hidden_mask(visible)[..., None], grey, pairs.view_1)
    with_cross, without = completed.values()
    write_grid(
        path,
        ("view 1, masked", "view 2", "completed", "completed without view 2", "view 1, truth"),
        [shown(x) for x in (masked, pairs.view_2, with_cross, without, pairs.view_1)],
    )


def _report(losses: dict[str, float], args: argparse.Namespace, seconds: float) -> int:
    with_cross, without = losses.values()
    print("\nMean squared error of the completed pixels on held-out photographs (variance 1):")
    for name, loss in losses.items():
        print(f"  {name:<24} {loss:.3f}")
    print(f"Picture: {args.output}   ({seconds:.0f} s on {args.device})")
    if with_cross < BETTER_BY * without:
        print(f"Looking at the second view removes {1 - with_cross / without:.0%} of the error.")
        return 0
    print(f"FAILED: expected less than {BETTER_BY:.0%} of the error without the second view.")
    return 1
