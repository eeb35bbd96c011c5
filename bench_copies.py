import os, sys, time, traceback
from dataclasses import replace
import torch, torch.distributed as dist, torch.multiprocessing as mp

MB = 1 << 20


def main(rank, n, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=n, device_id=torch.device("cuda", rank))
    import graphar
    from graphar.plan.algorithms import COPYING
    from graphar.plan.call import Call, Operands
    from graphar.plan.work import Parts

    c = graphar.Communicator(timeout_s=20, lossless=False)
    g = torch.Generator("cuda").manual_seed(rank)
    say = print if rank == 0 else lambda *a, **k: None

    def timed(f, count=8, warm=2):
        for _ in range(warm):
            f()
        torch.cuda.synchronize()
        dist.barrier()
        ts = []
        for _ in range(count):
            a, b = torch.cuda.Event(True), torch.cuda.Event(True)
            a.record()
            f()
            b.record()
            ts.append((a, b))
        torch.cuda.synchronize()
        t = torch.tensor([a.elapsed_time(b) * 1e3 for a, b in ts]).median().cuda()
        dist.all_reduce(t, dist.ReduceOp.MAX)
        return float(t)

    def section(f):
        try:
            f()
        except Exception:
            traceback.print_exc()
            sys.stdout.flush()

    def graphed(f):
        f()
        torch.cuda.synchronize()
        gr = torch.cuda.CUDAGraph()
        with torch.cuda.graph(gr):
            f()
        return gr.replay

    def policy(**k):
        c.engine.use_table(replace(c.engine.table, copies=replace(c.engine.table.copies, **k)))

    raw = torch.randint(-(2**31), 2**31 - 1, (256 * MB,), dtype=torch.int32, device="cuda", generator=g)
    sym = c.empty(512 * MB, dtype=torch.bfloat16)

    def allreduces():
        for mb in (8, 16, 32, 64, 128, 256, 512, 1024):
            x = raw[: mb * MB // 4].view(torch.bfloat16)
            y = torch.empty_like(x)
            z = x.clone().normal_()
            s = sym[: x.numel()]
            row = {"nccl": timed(lambda: dist.all_reduce(z))}
            row["kernels"] = timed(lambda: graphar.allreduce(x, c, out=y))
            row["kernels sym"] = timed(lambda: graphar.allreduce(x, c, out=s))
            f = lambda: graphar.allreduce(x, c, out=y, algorithm="two_shot_copies")
            h = lambda: graphar.allreduce(x, c, out=s, algorithm="two_shot_copies")
            row["copies"] = timed(f)
            row["copies sym"] = timed(h)
            row["graph"] = timed(graphed(f))
            row["graph sym"] = timed(graphed(h))
            say("allreduce", mb, {k: round(v) for k, v in row.items()}, flush=True)

    section(allreduces)

    def variants():
        for mb in (64, 256, 1024):
            x = raw[: mb * MB // 4].view(torch.bfloat16)
            y = torch.empty_like(x)
            for k in (
                {"sum_blocks": 8},
                {"sum_blocks": 16},
                {"sum_blocks": 64},
                {"sum_blocks": 131},
                {"sum_blocks": 32},
                {"chunk_nbytes": 2 * MB},
                {"chunk_nbytes": 8 * MB},
                {"chunk_nbytes": 4 * MB},
                {"chunks": 4},
                {"chunks": 16},
                {"chunks": 8},
            ):
                policy(**k)
                say(
                    "variant",
                    mb,
                    k,
                    round(timed(lambda: graphar.allreduce(x, c, out=y, algorithm="two_shot_copies"), 5)),
                    flush=True,
                )

    section(variants)
    e = c.engine

    def parts(op, x, out, count, algorithm, **k):
        call = Call.of(Parts(op, (count,) * n), x, algorithm=algorithm, **k)
        o = [Operands((x,), (out,))]
        return lambda: e.run(call, o)

    def gathers():
        for mb in (64, 128, 256, 512):
            count = mb * MB // 2 // n
            x, out = raw.view(torch.bfloat16)[:count], torch.empty(count * n, dtype=torch.bfloat16, device="cuda")
            s = sym[: count * n]
            own = s[rank * count : (rank + 1) * count]
            row = {
                "nccl": timed(lambda: dist.all_gather_into_tensor(out, x)),
                "kernels": timed(parts("allgather", x, out, count, "auto")),
                "64 blocks": timed(parts("allgather", x, out, count, "auto", blocks=64)),
                "scratch": timed(parts("allgather", x, out, count, "allgather_copies")),
                "direct": timed(parts("allgather", x, s, count, "allgather_copies", symmetric=("output",))),
                "direct in place": timed(parts("allgather", own, s, count, "allgather_copies", symmetric=("output",))),
            }
            say("gather", mb, {k: round(v) for k, v in row.items()}, flush=True)
            x, out = raw.view(torch.bfloat16)[: count * n], out[:count]
            row = {
                "nccl": timed(lambda: dist.reduce_scatter_tensor(out, x)),
                "kernels": timed(parts("reducescatter", x, out, count, "auto")),
                "64 blocks": timed(parts("reducescatter", x, out, count, "auto", blocks=64)),
                "copies": timed(parts("reducescatter", x, out, count, "reducescatter_copies")),
            }
            for b in (8, 16, 131, 32):
                policy(sum_blocks=b)
                row[f"copies {b}"] = timed(parts("reducescatter", x, out, count, "reducescatter_copies"))
            say("scatter", mb, {k: round(v) for k, v in row.items()}, flush=True)

    section(gathers)

    def host():
        count = 1 << 16
        x, s = raw.view(torch.bfloat16)[:count], sym[: count * n]
        y = torch.empty(count // n, dtype=torch.bfloat16, device="cuda")
        for name, f in (
            ("gather", parts("allgather", x, s, count, "allgather_copies", symmetric=("output",))),
            ("scatter", parts("reducescatter", x, y, count // n, "reducescatter_copies")),
        ):
            f()
            torch.cuda.synchronize()
            dist.barrier()
            ts = []
            for _ in range(30):
                t = time.perf_counter()
                f()
                ts.append((time.perf_counter() - t) * 1e6)
                torch.cuda.synchronize()
            say("host us", name, round(sorted(ts)[15], 1), flush=True)

    section(host)

    def beside():
        side = torch.cuda.Stream(priority=-1)
        count = 128 * MB // 2
        x, out = raw.view(torch.bfloat16)[:count], torch.empty(count * n, dtype=torch.bfloat16, device="cuda")
        big, part = raw.view(torch.bfloat16)[: count * n], torch.empty(count, dtype=torch.bfloat16, device="cuda")
        ways = {
            "alone": None,
            "nccl gather": lambda: dist.all_gather_into_tensor(out, x),
            "nccl scatter": lambda: dist.reduce_scatter_tensor(part, big),
            "kernels gather": parts("allgather", x, out, count, "auto", blocks=64),
            "kernels scatter": parts("reducescatter", big, part, count, "auto", blocks=64),
            "copies gather": parts("allgather", x, sym[: count * n], count, "allgather_copies", symmetric=("output",)),
            "copies gather scratch": parts("allgather", x, out, count, "allgather_copies"),
        }
        scat = parts("reducescatter", big, part, count, "reducescatter_copies")
        for b in (8, 16, 32, 131):
            ways[f"copies scatter {b}"] = scat
        for shape in ((4096, 8192, 8192), (2048, 4096, 14336), (2048, 14336, 4096)):
            m, nn, k = shape
            a, w = (
                torch.randn(m, k, device="cuda", dtype=torch.bfloat16),
                torch.randn(nn, k, device="cuda", dtype=torch.bfloat16),
            )
            o = torch.empty(m, nn, device="cuda", dtype=torch.bfloat16)
            base = None
            for name, f in ways.items():
                if name.startswith("copies scatter"):
                    policy(sum_blocks=int(name.split()[-1]))
                calls = 4

                def go():
                    if f:
                        side.wait_stream(torch.cuda.current_stream())
                        with torch.cuda.stream(side):
                            b0 = torch.cuda.Event(True)
                            b0.record()
                            for _ in range(calls):
                                f()
                            b1 = torch.cuda.Event(True)
                            b1.record()
                    torch.cuda._sleep(200000)
                    e0, e1 = torch.cuda.Event(True), torch.cuda.Event(True)
                    e0.record()
                    for _ in range(max(1, int(2.2e-3 * 7e14 / (2 * m * nn * k)))):
                        torch.mm(a, w.t(), out=o)
                    e1.record()
                    torch.cuda.synchronize()
                    return e0.elapsed_time(e1), b0.elapsed_time(b1) / calls if f else 0

                go()
                dist.barrier()
                rs = sorted(go() for _ in range(5))
                t, ct = rs[2]
                base = base or t
                say("beside", shape, f"{name:24} x{t / base:.3f} ({t:.2f} ms), a call {ct * 1e3:.0f} us", flush=True)

    section(beside)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    mp.spawn(main, args=(2, 29517), nprocs=2)
