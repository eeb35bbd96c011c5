// Readiness beside the data: each 4 bytes travel with a flag in the same 8 bytes, the fingerprint of the call.
//
// For data in which no value is free to mean 'not yet' (sentinel.cuh). It sends twice the bytes: 32 packs of data, or
// fewer, take 64 packs of a slot, so a slot has a multiple of 1,024 bytes. 8 bytes are never torn: with the flag the
// data have arrived. (3) and (4) hold: two slots alternate by the epoch's parity, the receiver arms a place again
// (flags 0) right after reading it, and each rank hears from every other in each call. So a flag that is neither 0 nor
// this rank's fingerprint is of a peer that calls something else: it is found before the data are used.
#pragma once
#include "device/pack.cuh"
#include "device/sync/deadline.cuh"

// Where a pack lies: two pairs. By any thread: `half` is the address of one. A warp's first pairs lie together, then
// its second pairs, so that each of its stores fills whole lines.
struct FlaggedPlace {
  Pair* first;
  DEVICE Pair* half(int h) const { return first + 32 * h; }
};

// By any thread: the place of pack j in the slot at offset `slot` of the scratch on the rank `hop` after this one. It
// touches no memory. 32 packs of data have 64 places of a slot.
DEVICE FlaggedPlace place(const Arguments& a, int hop, u32 slot, u32 j) {
  return {reinterpret_cast<Pair*>(a.ring[hop]) + slot + j / 32 * 64 + j % 32};
}

// By any thread, after read_epoch: sends a pack of any bits with this call's flag. Two relaxed stores of system scope,
// each with its own readiness; they publish nothing else (4). Once a call for each place, as `push`. A slot has a
// multiple of 64 packs, `capacity`, and room for half as many packs of data.
DEVICE void push_flagged(const Arguments& a, const FlaggedPlace& to, const Pack& p) {
  const u64 here = u64(a.fingerprint) << 32;
  for (int h = 0; h < 2; ++h) store_relaxed_sys(to.half(h), Pair{{p.word[2 * h] | here, p.word[2 * h + 1] | here}});
}

// Internal: a pack as read, its first flag, and the bits in which its flags differ from this call's: 0 once all have
// arrived.
struct Arrival {
  Pack pack;
  u32 flag, difference;
};

// Internal: loads a place.
DEVICE Arrival look(const Arguments& a, const FlaggedPlace& at) {
  Arrival found{{}, 0, 0};
  for (int h = 0; h < 2; ++h) {
    const Pair pair = load_relaxed_sys(at.half(h));
    for (int i = 0; i < 2; ++i) {
      found.pack.word[2 * h + i] = u32(pair.half[i]);
      const u32 flag = pair.half[i] >> 32;
      if (h == 0 && i == 0) found.flag = flag;
      found.difference |= flag ^ a.fingerprint;
    }
  }
  return found;
}

// By one thread for each place, after read_epoch: receives pack j from each other rank that sends more than j packs,
// polled in one loop, and arms the places again: part[hop - 1] from the rank `hop` after this one, which sends
// packs[hop - 1]. `slots` is the offset of the slots of this parity, of `capacity` packs each, a multiple of 64.
// Relaxed loads and stores of system scope: no other location may be read on the strength of them (4). False when the
// wait expired, or a rank calls something else.
template <int N>
DEVICE bool receive_flagged(const Arguments& a, const Call& call, u32 slots, u32 j, const u32 (&packs)[N - 1],
                            Pack (&part)[N - 1]) {
  FlaggedPlace from[N - 1];
  for (int i = 0; i < N - 1; ++i) from[i] = place(a, 0, slots + (a.rank + 1 + i) % N * a.capacity, j);
  const auto is_of_another_call = [&](u32 flag) { return flag != 0 && flag != a.fingerprint; };
  Deadline deadline;
  while (true) {
    u32 missing = N, flag = 0;  // of a rank that calls something else if there is one
    for (int i = 0; i < N - 1; ++i) {
      if (j >= packs[i]) continue;
      const Arrival found = look(a, from[i]);
      part[i] = found.pack;
      if (found.difference != 0 && (missing == N || is_of_another_call(found.flag)))
        missing = (a.rank + 1 + i) % N, flag = found.flag;
    }
    if (missing == N) break;
    if (is_of_another_call(flag)) {
      report(a, disagreed, call.epoch, missing, a.fingerprint, flag);
      return false;
    }
    const Deadline::State state = deadline.check(a, call);
    if (state == Deadline::waiting) continue;
    if (state == Deadline::expired) report(a, timed_out, call.epoch, missing, 1, 0);
    return false;
  }
  for (int i = 0; i < N - 1; ++i) {
    if (j >= packs[i]) continue;
    store_relaxed_sys(from[i].half(0), Pair{});
    store_relaxed_sys(from[i].half(1), Pair{});
  }
  return true;
}
