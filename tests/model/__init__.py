"""Small models of the protocols between ranks, searched exhaustively, at 2 and 3 ranks; each with faults that must be seen.

    explore    the search
    machine    ranks, threads, and a memory in which stores arrive late and in any order: what kernels may rely on
    programs   what a thread can do
    sentinel   one_shot_push, reducescatter_push, allgather_flagged, two_shot_push: data that carry their own readiness
    signals    two_shot_pipelined, allgather_push, one_shot, one_shot_unstaged: flags, and chunks that they announce
    tma        two_shot_tma: warps, bulk copies and mbarriers

Covered: every order in which blocks of all ranks run and their stores arrive, over several calls with other sizes and
grids, so that each place of the scratch is used again; waits that expire at any moment, and a rank that dies at any moment.
No data may be overwritten unread, every word read must be the right one, and nobody may wait for ever.

Not covered. The models were written by hand after the kernels, and nothing but a reader compares the two: tests/host runs
the kernels' own code. A pack is one or two words, a rank one or two blocks (a thread for each; in two_shot_push, for each
group of warps; in two_shot_tma, for each role), and the scratch of two_shot_tma has fewer places than the kernel's. What
holds at 2 and 3 ranks is not proved for 8. Loads are performed in program order: a wait that is no acquire is not modelled,
but for what it would allow, a read before the wait. Counters do not wrap. No barrier inside a block, no fences between
proxies and aliases, no multimem. A deadline may expire at any time, so nothing is said about how late, or in which
rank first. Symmetric tensors after a wait has expired are left out: what a slow peer still reads or writes there, the
caller may by then have changed.
"""
