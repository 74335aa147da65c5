"""Our communicating kernels on one device: their matmuls against the library's, the fused norm against its sequence.

The matmuls run as a world of one rank, so that what is timed is the kernel with its flags and no link. The norm runs as
ranks that are streams of one process with buffers of their own. Whether the operators compute what they should with
ranks that are processes is checked apart, on one device that they share.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

GEMM_HEADER = ("matmul", "dtype", "torch.mm ms", "gather + mm ms", "/ torch.mm", "mm + scatter ms", "/ torch.mm")
NORM_HEADER = ("rows x columns", "ranks", "unfused us", "one shot us", "times", "two shots us", "times")
GEMM_SIZES = ((4096, 4096, 4096), (4096, 8192, 8192), (8192, 8192, 8192))
NORM_ROWS = (1, 4, 16, 64)
#: Calls of the norm in one measurement: one takes microseconds.
TIMES = 10
Timer = Callable[[Callable[[], Any]], float]
#: An epoch that no measurement reaches.
_FAR = 1 << 30


#: Data, flags, pages, rank, ranks and epoch: what every kernel takes.
Arguments = tuple[torch.Tensor, torch.Tensor, tuple[int, int], int, int, torch.Tensor]


class Pages:
    """Buffers of all ranks in one process: the arguments of a kernel, per rank."""

    def __init__(self, ranks: int, data_bytes: int, flags: int, device: torch.device) -> None:
        data_bytes = -(-data_bytes // 256) * 256
        self.ranks, self.pages = ranks, (data_bytes, 4 * flags)
        self._own = [torch.zeros(2 * (data_bytes + 4 * flags), dtype=torch.uint8, device=device) for _ in range(ranks)]
        data = torch.tensor([own.data_ptr() for own in self._own])
        self.data, self.flags = data.to(device), (data + 2 * data_bytes).to(device)
        self.epochs = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(ranks)]

    def raise_flags(self, epoch: int) -> None:
        """As if all ranks had come as far as ``epoch``: whoever waits for less does not wait."""
        for own in self._own:
            own[2 * self.pages[0] :].view(torch.int32).fill_(epoch)

    def reset(self) -> None:
        """Before the first call again."""
        self.raise_flags(0)
        for epoch in self.epochs:
            epoch.zero_()

    def next(self, rank: int) -> Arguments:
        """The arguments of the next call on a rank."""
        self.epochs[rank].add_(1)
        return (self.data, self.flags, self.pages, rank, self.ranks, self.epochs[rank])


def _medians(timed: Timer, contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median ms of every contender, in turn, after two rounds that do not count."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 2):
        for name, run in contenders.items():
            took = timed(run)
            if number >= 2:
                found[name].append(took)
    return {name: median(times) for name, times in found.items()}


def recorded(run: Callable[[], Any], device: torch.device, times: int = 1) -> Callable[[], Any]:
    """``run``, ``times`` over, as one launch: a CUDA graph, so that what the host takes to launch is not timed."""
    if device.type != "cuda":
        return lambda: [run() for _ in range(times)]
    for _ in range(2):
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph.replay


def gemms(
    device: torch.device,
    timed: Timer,
    rounds: int,
    sizes: tuple[tuple[int, int, int], ...] = GEMM_SIZES,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16),
) -> list[list[str]]:
    """Rows of ``GEMM_HEADER`` for (m, k, n)."""
    from inductor_passes.kernels import gather_gemm, gemm_scatter
    from inductor_passes.kernels.tiles import tiles_for

    rows = []
    for dtype in dtypes:
        for m, k, n in sizes:
            left = torch.randn(m, k, device=device, dtype=dtype) / k**0.5
            right = torch.randn(k, n, device=device, dtype=dtype)
            cut = tiles_for(device, dtype)
            gathered = Pages(1, gather_gemm.data_bytes(m, k, 1, dtype), gather_gemm.flag_count(m, 1, cut), device)
            slots = Pages(1, gemm_scatter.data_bytes(m, n, 1), gemm_scatter.flag_count(m, n, 1, cut), device)
            sent = gathered.next(0)
            gather_gemm.push(left, *sent, cut)

            def gather(
                sent: Arguments = sent, right: Any = right, cut: Any = cut, m: int = m, k: int = k
            ) -> torch.Tensor:
                return gather_gemm.gemm((m, k), right, None, *sent, cut)

            def scatter(
                slots: Pages = slots, left: Any = left, right: Any = right, cut: Any = cut, m: int = m, n: int = n
            ) -> torch.Tensor:
                common = slots.next(0)
                gemm_scatter.gemm(left, right, *common, cut)
                return gemm_scatter.reduce(left, (m, n), *common, cut)

            expected = left @ right
            for found in (gather(), scatter()):
                torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
            library = lambda left=left, right=right: torch.mm(left, right)  # noqa: E731
            runs: dict[str, Callable[[], Any]] = {"mm": library, "gather": gather, "scatter": scatter}
            took = _medians(timed, {name: recorded(one, device) for name, one in runs.items()}, rounds)
            # The share of the library's rate, as for a peak: more is better.
            shares = [f"{took['mm'] / took[name]:.2f}" for name in ("gather", "scatter")]
            name = str(dtype).removeprefix("torch.")
            rows.append(
                [f"{m}x{k}x{n}", name, f"{took['mm']:.3f}", f"{took['gather']:.3f}", shares[0]]
                + [f"{took['scatter']:.3f}", shares[1]]
            )
    return rows


def norms(
    device: torch.device,
    timed: Timer,
    rounds: int,
    worlds: tuple[int, ...] = (2, 4),
    numbers: tuple[int, ...] = NORM_ROWS,
    columns: int = 8192,
) -> list[list[str]]:
    """Rows of ``NORM_HEADER``: all ranks at once, each on a stream of its own.

    With more streams than the device has hardware queues (8 by default, one of them the current stream's) two ranks
    can share a queue, and the one behind would be waited for without end.
    """
    from inductor_passes.kernels import reduce_norm
    from inductor_passes.kernels.tiles import programs_for

    rows = []
    for world in worlds:
        # Programs of all ranks wait for each other: together they must fit on the device.
        programs = max(1, programs_for(device, 1 << 20) // world)
        streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(world)]
        for number in numbers:
            parts = [torch.randn(number, columns, device=device, dtype=torch.bfloat16) for _ in range(world)]
            residual, weight = torch.randn_like(parts[0]), torch.randn(columns, device=device, dtype=torch.bfloat16)
            whole = torch.stack(parts)
            flags = reduce_norm.flag_count(number, world)
            shots = {
                shot: Pages(world, reduce_norm.data_bytes(number, columns, torch.bfloat16, shot), flags, device)
                for shot in (False, True)
            }

            def on_streams(run: Callable[[int], Any], streams: list[Any] = streams) -> Callable[[], list[Any]]:
                def everything() -> list[Any]:
                    if streams[0] is None:
                        return [run(rank) for rank in range(len(streams))]
                    current = torch.cuda.current_stream()
                    results = []
                    for rank, stream in enumerate(streams):
                        stream.wait_stream(current)
                        with torch.cuda.stream(stream):
                            results.append(run(rank))
                    for stream in streams:
                        current.wait_stream(stream)
                    return results

                return everything

            def fused(shot: bool, parts: Any = parts, residual: Any = residual, weight: Any = weight) -> Any:
                pages = shots[shot]  # noqa: B023  called in this round only
                return on_streams(
                    lambda rank: reduce_norm.all_reduce_residual_rms_norm(
                        parts[rank], residual, weight, *pages.next(rank), two_shot=shot, programs=programs  # noqa: B023
                    )[:2]
                )

            def sequence(rank: int, whole: Any = whole, residual: Any = residual, weight: Any = weight) -> Any:
                hidden = residual + whole.sum(0)
                return hidden, torch.nn.functional.rms_norm(hidden, (weight.shape[0],), weight, 1e-5)

            runs = {"unfused": on_streams(sequence), "one": fused(False), "two": fused(True)}
            # A rank that waits must not keep the other one from being compiled and loaded, which waits for the device.
            for shot, name in ((False, "one"), (True, "two")):
                shots[shot].raise_flags(_FAR)
                runs[name]()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                shots[shot].reset()
            for name in ("one", "two"):
                for hidden, y in runs[name]():
                    expected = sequence(0)
                    torch.testing.assert_close(hidden.float(), expected[0].float(), rtol=2e-2, atol=6e-2)
                    torch.testing.assert_close(y.float(), expected[1].float(), rtol=2e-2, atol=6e-2)
            launches = {name: recorded(run, device, TIMES) for name, run in runs.items()}
            took = {name: 1e3 * ms / TIMES for name, ms in _medians(timed, launches, rounds).items()}
            row = [f"{number}x{columns}", str(world), f"{took['unfused']:.1f}"]
            for name in ("one", "two"):
                row += [f"{took[name]:.1f}", f"{took['unfused'] / took[name]:.2f}"]
            rows.append(row)
    return rows


def _check_rank(rank: int, world: int, port: int, device_type: str) -> None:
    """All operators on one rank against gathered operands; raises when they differ."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    import inductor_passes
    from inductor_passes.async_tp import kernel_ops  # noqa: F401  registers the operators
    from inductor_passes.groups.availability import availability

    if device_type == "cuda":
        torch.cuda.set_device(0)
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    limit, address = datetime.timedelta(minutes=2), f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=limit)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    inductor_passes.prepare_groups(groups=[dist.group.WORLD])
    why = availability(group).kernels
    if why:
        raise RuntimeError(f"kernels cannot be used here: {why}")
    ops = torch.ops.inductor_passes
    dtypes = (torch.float32, torch.bfloat16) if device_type == "cuda" else (torch.float32,)
    for dtype in dtypes:
        for rows, k, n in ((40, 24, 36), (136, 96, 72)):

            def whole(seed: int, *shape: int, dtype: torch.dtype = dtype) -> list[torch.Tensor]:
                generators = [torch.Generator().manual_seed(seed + r) for r in range(world)]
                return [torch.randint(-2, 3, shape, generator=g).to(device, dtype) for g in generators]

            shards, lefts = whole(1, rows, k), whole(2, world * rows, k)
            right, bias = whole(3, k, n)[0], whole(4, n)[0]
            out, gathered = ops.symm_gathered_mm(shards[rank], [right], [bias], world, group, True)
            torch.testing.assert_close(out, torch.cat(shards) @ right + bias, rtol=1e-2, atol=1e-2)
            assert torch.equal(gathered, torch.cat(shards))
            found = ops.symm_mm_scattered(lefts[rank], right, "sum", world, group)
            total = torch.stack([left.float() @ right.float() for left in lefts]).sum(0)
            torch.testing.assert_close(found.float(), total[rank * rows :][:rows], rtol=1e-2, atol=1e-2)
            residual, weight = whole(5, rows, k)[0], whole(6, k)[0]
            for two_shot in (False, True):
                h, _ = ops.all_reduce_residual_rms_norm(
                    shards[rank], residual, weight, 1e-5, dtype, world, group, two_shot
                )
                assert torch.equal(h, (residual.float() + sum(s.float() for s in shards)).to(dtype))
    dist.destroy_process_group()


def check(device: torch.device, worlds: tuple[int, ...] = (2, 4)) -> str:
    """All operators with ranks that are processes and share the device; says for which worlds they were right."""
    for world in worlds:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        torch.multiprocessing.spawn(_check_rank, (world, port, device.type), nprocs=world)
    return f"operators on {' and '.join(map(str, worlds))} ranks that share one device: equal to what they replace"
