// Readiness in the data: a word of all ones means 'not yet'.
//
// All ones is a NaN (two NaNs in 16-bit types). A sender turns a word of all ones into another NaN. A sum with a NaN in
// it is the canonical NaN whatever the payload, so no bit of a result depends on this. Each of a pack's words is
// checked, since a store of several may arrive torn. Sums of a narrower type travel as half packs. A slot takes packs
// in one call and half packs in another: what is said here holds for each word by itself.
//
// (3) Two slots alternate by the epoch's parity. The receiver arms a word again (all ones) right after reading it. The
//     sender's next store to that word comes in its call e + 2, after its call e + 1 ended. No rank ends a call before
//     every rank has begun it, since a sum needs a pack of each. By (1) a rank that has begun call e + 1 has all of
//     call e behind it, with its arming stores performed in the L2 that owns those words. So the arming store comes
//     first, whatever the sizes and grids of the calls. This needs every rank to hear from every other in each call. A
//     rank whose part is empty would wait for nobody, run ahead, and push into slots that a slower rank has yet to arm.
//     So an empty part is sent as one pack, and an empty tensor launches nothing.
//     PTX alone does not promise this, since no synchronizes-with edge leads from the arming store to the sender's next
//     one. It rests on the owner's L2 as the one memory where both stores are performed, the first before the second.
//     That is so on GPUs of one die, to Hopper. Nobody has measured it where two dies share an L2, as in Blackwell.
// (4) Relaxed accesses suffice: the words of a pack publish no other location.
#pragma once
#include "device/pack.cuh"
#include "device/sync/deadline.cuh"

// The sentinel: a word that has not arrived.
constexpr u32 not_yet = 0xffffffffu;

// By any thread: the pack, or half pack, at offset `at` of the scratch on the rank that comes `hop` after this one.
// Offsets count elements of type P: one pack is two half packs.
template <class P = Pack>
DEVICE P* slot(const Arguments& a, int hop, u32 at) {
  return reinterpret_cast<P*>(a.ring[hop]) + at;
}

// By any thread, after read_epoch: sends a pack, or half pack, to a place on any rank. A relaxed store of system scope:
// the pack is its own readiness, and publishes nothing else (4). Once a call for each place, which this rank alone
// writes, and which alternates with another by the epoch's parity (3). Every rank sends at least one pack to every
// other in each call.
template <class P>
DEVICE void push(P* place, P p) {
  for (u32& word : p.word) word = min(word, not_yet - 1);  // all ones become another NaN
  store_relaxed_sys(place, p);
}

template <class P>
DEVICE void push(const Arguments& a, int hop, u32 at, const P& p) {
  push(slot<P>(a, hop, at), p);
}

// By any thread: `push` to every rank, relaxed and of system scope, including this one, so that all packs arrive in the
// same way. Each rank begins with its next peer.
template <int N>
DEVICE void push_to_all(const Arguments& a, u32 at, const Pack& p) {
  for (int hop = 1; hop <= N; ++hop) push(a, hop % N, at, p);
}

// Internal: pushes packs of the input that may not be whole or aligned: `first` and every `stride`-th after it, below
// `end`, each to as far an offset from `at` of the rank `hop` after this one, or with `Places` = N of all ranks.
template <class T, int Places>
__device__ __noinline__ void push_elements(const Arguments& a, u32 hop, u32 at, u32 first, u32 end, u32 stride) {
  const Tensor<T> input(a.input, a.numel);
#pragma unroll 1
  for (u32 i = first; i < end; i += stride) {
    const Pack p = input.load(i);
    for (int place = 0; place < Places; ++place) push(a, Places == 1 ? hop : place, at + i, p);
  }
}

// What a thread sends: packs of a tensor that are `stride` apart, each to places as far apart on `Places` ranks. It is
// made before a kernel's wait, which it is named in (16). A thread loads `ahead` packs before it sends them.
template <int Places, u32 ahead = Places == 1 ? 4 : Places == 2 ? 2 : 1>
struct Outgoing {
  const Pack* from;
  Pack* to[Places];
  u32 stride, count;  // `count` from the first pack to the end
  u32 sent = 0;       // the next pack of push_next, as `count`
  Pack mine[ahead];

  // By any thread: packs `first`, `first` + `stride`, ... below `end` of the tensor at `input`, all of them whole and
  // aligned. Touches no memory.
  DEVICE Outgoing(const void* input, u32 first, u32 end, u32 stride)
      : from(static_cast<const Pack*>(input) + first), stride(stride), count(first < end ? end - first : 0) {}

  // Internal: (16).
  DEVICE u32 hold() { return ::hold(from) | ::hold(to) | ::hold(stride) | ::hold(count); }

  // By any thread, after the wait: loads the first packs. Weak.
  DEVICE void load() {
    for (u32 k = 0; k < ahead; ++k)
      if (k * stride < count) mine[k] = from[k * stride];
  }

  // By any thread, after read_epoch: pushes all packs, to places that are `slots` further on. Relaxed stores of system
  // scope, as `push`.
  DEVICE void push_all(u32 slots) {
#pragma unroll 1
    for (u32 i = 0; i < count;) {
      for (u32 k = 0; k < ahead && i < count; ++k, i += stride) {
        for (Pack* place : to) push(place + slots + i, mine[k]);
        if (i + ahead * stride < count) mine[k] = from[i + ahead * stride];
      }
    }
  }

  // By any thread, after read_epoch, with `ahead` = 1: pushes the next pack, if there is one, and loads the one after
  // it. Relaxed stores of system scope, as `push`.
  DEVICE void push_next(u32 slots) {
    static_assert(ahead == 1);
    if (sent >= count) return;
    for (Pack* place : to) push(place + slots + sent, mine[0]);
    sent += stride;
    if (sent < count) mine[0] = from[sent];
  }
};

// By any thread: whether no word of a loaded pack, or half pack, is the sentinel. Touches no memory.
DEVICE bool arrived(const Pack& p) {
  return p.word[0] != not_yet && p.word[1] != not_yet && p.word[2] != not_yet && p.word[3] != not_yet;
}

DEVICE bool arrived(const HalfPack& p) { return p.word[0] != not_yet && p.word[1] != not_yet; }

// By any thread: whether no word of loaded packs, or half packs, is the sentinel. Touches no memory.
template <class P, int Count>
DEVICE bool arrived(const P (&parts)[Count]) {
  u32 most[Count];
  for (int i = 0; i < Count; ++i) {
    most[i] = max(parts[i].word[0], parts[i].word[1]);
    if constexpr (sizeof(P) == sizeof(Pack)) most[i] = max(most[i], max(parts[i].word[2], parts[i].word[3]));
  }
  for (int i = 1; i < Count; ++i) most[0] = max(most[0], most[i]);
  return most[0] != not_yet;
}

// By one thread, which has received what was there: makes a place wait for data again. A relaxed store of system scope
// into this rank's own scratch (3).
DEVICE void arm(Pack* place) { store_relaxed_sys(place, Pack{{not_yet, not_yet, not_yet, not_yet}}); }
DEVICE void arm(HalfPack* place) { store_relaxed_sys(place, HalfPack{{not_yet, not_yet}}); }

// By any thread: loads what has come to offset `at` of this rank's scratch from each of N ranks, whose slots are
// `capacity` apart. Relaxed loads of system scope: no other location may be read on the strength of them (4).
template <int N, class P>
DEVICE void look_at(const Arguments& a, u32 at, P (&part)[N]) {
  for (int r = 0; r < N; ++r) part[r] = load_relaxed_sys(slot<P>(a, 0, at + r * a.capacity));
}

// Internal: by a thread that has waited for some time for packs of N ranks at offset `at`. Returns when its wait began,
// as `start` of the next time, or 0 if it gives up.
template <int N, class P>
__device__ __noinline__ u64 wait_longer(const Arguments& a, u32 epoch, u32 was_busy, int source, u32 at, u64 start) {
  Deadline deadline(start);
  const Deadline::State state = deadline.look(a, {epoch, was_busy, 0}, N == 1 ? 5 : 4);
  if (state == Deadline::waiting) return deadline.start();
  int missing = -1;
#pragma unroll 1
  for (int r = 0; r < N; ++r) {
    const P seen[1] = {load_relaxed_sys(slot<P>(a, 0, at + r * a.capacity))};
    if (!arrived(seen)) missing = r;
  }
  if (state == Deadline::aborted) return 0;
  if (missing < 0) return start;  // all have come meanwhile
  report(a, timed_out, epoch, source + missing, epoch, not_yet);
  return 0;
}

// Internal: looks at a place until the packs of all N ranks have come. False when the wait expired. What a long wait
// does is out of line, so that the loops of a kernel that lives by its latency are compact.
template <int N, class P>
DEVICE bool await(const Arguments& a, const Call& call, int source, u32 at, P (&part)[N]) {
  static_assert(N == 1 || in_a_pack<P> == 1, "half packs come from one rank at a time");
  u64 start = 0;
  u32 spins = 0;
  while (true) {
    look_at(a, at, part);
    if (arrived(part)) return true;
    if (++spins % spins_a_look != 0) continue;
    start = wait_longer<N, P>(a, call.epoch, call.was_busy, source, at, start);
    if (start == 0) return false;
  }
}

// By one thread, which has received what was there: makes the places of N ranks wait for data again. Relaxed stores of
// system scope into this rank's own scratch (3).
template <int N, class P>
DEVICE void arm_all(const Arguments& a, u32 at, const P (&)[N]) {
  for (int r = 0; r < N; ++r) arm(slot<P>(a, 0, at + r * a.capacity));
}

// By one thread for each place, after read_epoch: receives one pack from each of N ranks at each of `Count` places, and
// arms the places again: `part[i][r]` from rank `source` + r, at offset `at[i]` + r * capacity of this rank's scratch.
// Relaxed loads and stores of system scope: no other location may be read on the strength of them (4). False when the
// wait expired: the thread then receives no more and goes on to end_call. With N = 1 the pack is a sum, for which its
// sender waits too, so its deadline is longer: the record then names the rank that did not come.
template <int Count, int N, class P>
DEVICE bool receive(const Arguments& a, const Call& call, int source, const u32 (&at)[Count], P (&part)[Count][N]) {
  static_assert(N == 1 || in_a_pack<P> == 1, "half packs come from one rank at a time");
  Deadline deadline;
  while (true) {
    bool all = true;
    for (int i = 0; i < Count; ++i) look_at(a, at[i], part[i]);
    for (int i = 0; i < Count; ++i)
      for (int r = 0; r < N; ++r) all &= arrived(part[i][r]);
    if (all) break;
    const Deadline::State state = deadline.check(a, call, N == 1 ? 5 : 4);
    if (state == Deadline::waiting) continue;
    if (state == Deadline::aborted) return false;
    int missing = 0;
    for (int i = 0; i < Count; ++i)
      for (int r = 0; r < N; ++r)
        if (!arrived(part[i][r])) missing = r;
    report(a, timed_out, call.epoch, source + missing, call.epoch, not_yet);
    return false;
  }
  for (int i = 0; i < Count; ++i) arm_all(a, at[i], part[i]);
  return true;
}

template <int N, class P>
DEVICE bool receive(const Arguments& a, const Call& call, int source, u32 at, P (&part)[N]) {
  const u32 place[1] = {at};
  return receive(a, call, source, place, reinterpret_cast<P(&)[1][N]>(part));
}

// By one thread for each place: receives, relaxed and of system scope, one pack of T from each of N ranks at each of
// `Count` neighbouring places, and adds them: `sum[i]`, at offset `at` + i. False when the wait expired.
template <class T, int N, class Order, int Count>
DEVICE bool receive_sums(const Arguments& a, const Call& call, u32 at, Pack (&sum)[Count]) {
  u32 place[Count];
  Pack part[Count][N];
  for (int i = 0; i < Count; ++i) place[i] = at + i;
  if (!receive(a, call, 0, place, part)) return false;
  for (int i = 0; i < Count; ++i) sum[i] = sum_in_order<T, N, Order, T>(part[i]);
  return true;
}

// Internal: sends nothing, for receive_each.
struct NoSend {
  DEVICE void operator()() const {}
};

// By one thread for each place: receives, relaxed and of system scope, from each of N ranks at every `stride`-th place
// from `first` up to `end`, counted from offset `base`. `use` gets each place with its packs; then the place is armed.
// With `Ahead` the next place is looked at before one is used, which costs a thread with one place time. `send` is
// called before each wait, by a kernel that does not send everything first.
template <int N, bool Ahead = false, class P = Pack, class Use, class Send = NoSend>
DEVICE void receive_each(const Arguments& a, const Call& call, int source, u32 base, u32 first, u32 end, u32 stride,
                         const Use& use, const Send& send = {}) {
  P next[N];
  if (Ahead && first < end) look_at(a, base + first, next);
#pragma unroll 1
  for (u32 i = first; i < end; i += stride) {
    P part[N];
    for (int r = 0; Ahead && r < N; ++r) part[r] = next[r];
    if (Ahead && i + stride < end) look_at(a, base + i + stride, next);
    send();
    if (!(Ahead && arrived(part)) && !await(a, call, source, base + i, part)) return;
    use(i, part);
    arm_all(a, base + i, part);
  }
}
