"""Small models of the protocols between ranks, searched exhaustively at 2 and 3 ranks, with faults that must be seen.

    explore    the search
    memory     stores that arrive late and in any order: what kernels may rely on
    programs   what a thread can do
    machine    ranks and threads, over that memory
    sentinel   one_shot_push, reducescatter_push, allgather_flagged, two_shot_push: data that carry their own readiness
    signals    two_shot_pipelined, allgather_push, one_shot: flags, and chunks that they announce
    tma        two_shot_tma: warps, bulk copies and mbarriers

Covered: every order in which the blocks of all ranks run and their stores arrive, over several calls with other sizes
and grids, so that each place of the scratch is used again; waits that expire at any moment, and a rank that dies at any
moment. No data may be overwritten unread, every word read must be the right one, and nobody may wait for ever.

Not covered:

- The kernels' own text. The models were written by hand after it, and only a reader compares the two. tests/host runs
  the kernels themselves, in some of the orders.
- Size. A pack is one word or two; a thread stands for a block, in two_shot_push for a group of warps, in two_shot_tma
  for a role; the scratch of two_shot_tma has one place or two where the kernel has three, and death is tried at 2 ranks
  only there. What holds at 2 and 3 ranks is not proved for 8.
- Loads that are performed early. A wait that is no acquire shows only as what it allows, a read before the wait.
- Barriers inside a block, fences between proxies and aliases, multimem, counters that wrap.
- Time. A deadline may expire whenever its wait has not ended, so nothing is said about when, or which rank is named.
- Symmetric tensors after a wait has expired: what a slow peer still reads or writes there, the caller may change.
"""
