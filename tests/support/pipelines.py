"""A pipeline of stages, each a function that torch traces into one graph: forward, backward and messages (1F1B).

A stage is two matmuls with a relu between them, its backward is written out. The schedule is the usual one: every
stage runs ahead by as many forwards as stages follow it, then one forward and one backward in turn, and waits for every
message right after it has issued it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor


class Messages:
    """What a stage sends and receives; receives of one kind have buffers of one shape."""

    def __init__(self, rank: int, stages: int, group: str, batched: bool) -> None:
        self.before, self.after = rank - 1, rank + 1 if rank + 1 < stages else -1
        self.group, self.batched = group, batched

    def exchange(self, send: tuple[Tensor, int] | None, receive: tuple[Tensor, int] | None) -> Tensor | None:
        """Issue both messages, then wait for both; what was received."""
        send = None if send is None or send[1] < 0 else send
        receive = None if receive is None or receive[1] < 0 else receive
        buffer = None if receive is None else torch.empty_like(receive[0])
        if self.batched and send is not None and receive is not None:
            both = c10d.batch_p2p_ops(["isend", "irecv"], [send[1], receive[1]], [0, 0], [send[0], buffer], self.group)
            c10d.wait_tensor(both[0])
            return c10d.wait_tensor(both[1])
        sent = None if send is None else c10d.isend(*send, 0, self.group)
        received = None if receive is None else c10d.irecv(buffer, receive[1], 0, self.group)
        if sent is not None:
            c10d.wait_tensor(sent)
        return None if received is None else c10d.wait_tensor(received)


def stage(rank: int, stages: int, group: str, batched: bool = False) -> Callable[..., tuple[Tensor, ...]]:
    """The step of one stage: (inputs of the first stage, one per microbatch; both weights) -> (loss, their gradients).

    What all stages but the first get as inputs only says how large a microbatch is; all but the last return a loss
    of 0.
    """

    def step(inputs: list[Tensor], first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        line, last = Messages(rank, stages, group, batched), rank == stages - 1
        ahead = min(stages - rank - 1, len(inputs))
        kept: list[tuple[Tensor, Tensor, Tensor]] = []
        losses, grads = [], []
        like = inputs[0]

        def forward(x: Tensor) -> Tensor:
            hidden = x @ first
            active = torch.relu(hidden)
            kept.append((x, hidden, active))
            return active @ second

        def backward(grad: Tensor) -> Tensor:
            x, hidden, active = kept.pop(0)
            of_hidden = (grad @ second.t()) * (hidden > 0)
            grads.append((x.t() @ of_hidden, active.t() @ grad))
            return of_hidden @ first.t()

        def source(k: int) -> Tensor:
            x = line.exchange(None, (like, line.before))
            return inputs[k] if x is None else x

        for k in range(ahead):
            line.exchange((forward(source(k)), line.after), None)
        x = source(ahead) if ahead < len(inputs) else None
        for k in range(ahead, len(inputs)):
            y = forward(x)
            if last:
                losses.append((y * y).sum())
                grad = 2 * y
            else:
                grad = line.exchange((y, line.after), (like, line.after))
            back = backward(grad)
            more = k + 1 < len(inputs)
            x = line.exchange((back, line.before), (like, line.before) if more else None)
            if more and x is None:
                x = inputs[k + 1]
        for _ in range(ahead):
            line.exchange((backward(line.exchange(None, (like, line.after))), line.before), None)
        loss = torch.stack(losses).sum() if losses else like.new_zeros(())
        return (loss, *(torch.stack(found).sum(0) for found in zip(*grads)))

    return step


def weights(stages: int, width: int) -> list[tuple[Tensor, Tensor]]:
    """Both weights of every stage."""
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(width, width, generator=generator) / width**0.5 for _ in "ab") for _ in range(stages)]


def microbatches(count: int, rows: int, width: int) -> list[Tensor]:
    """Inputs of the first stage."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, width, generator=generator) for _ in range(count)]


def whole(stages: int, inputs: list[Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Loss and gradients of all stages in one process."""
    parameters = [tuple(w.requires_grad_() for w in pair) for pair in weights(stages, inputs[0].shape[1])]
    total = torch.zeros(())
    for x in inputs:
        for first, second in parameters:
            x = torch.relu(x @ first) @ second
        total = total + (x * x).sum()
    total.backward()
    return total.detach(), [tuple(w.grad for w in pair) for pair in parameters]


def group_name() -> str:
    """Of the default process group."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name
