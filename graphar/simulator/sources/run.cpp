// Runs a case: calls of one algorithm's kernels on every rank. Reads it from the first file, and writes what came out to
// the second; simulation.py makes the one and reads the other, and case.hpp. Exits with 0 if every call came to an end.
//
// The third file has the number of the scheduler's step, however the run ends, and where the ranks' memory lies. With a
// number after it, the run prints what the threads did last before the step of this number, and ends there.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "case.hpp"
#include "device/ptx/ptx.cuh"
#include "kept.hpp"
#include "kernels.hpp"
#include "sanitizers.hpp"

namespace {

using simulator::Call, simulator::Case, simulator::Outcome;

constexpr size_t guard_nbytes = 128;
constexpr u64 apart_ns = 10'000'000;  // between the launches of two communicators on one GPU
constexpr char guard = char(0xa5);

// Memory with guards on both sides. AddressSanitizer reports any access by a kernel outside a window of it.
class Region {
 public:
  void allocate(size_t n) {
    nbytes_ = (n + 127) / 128 * 128 + 2 * guard_nbytes;
    bytes_ = simulator::take_apart(nbytes_);
  }

  char* data() { return bytes_ + guard_nbytes; }

  // Makes all of it guards, until a window is opened.
  void close() {
    simulator::allow(bytes_, bytes_ + nbytes_);
    std::memset(bytes_, guard, nbytes_);
    simulator::forbid(bytes_, bytes_ + nbytes_);
  }

  void open(size_t offset, size_t n) { simulator::allow(data() + offset, data() + offset + n); }

  // Whether nothing was written beside the window. Allows access to all of the region.
  bool intact(size_t offset, size_t n) {
    simulator::allow(bytes_, bytes_ + nbytes_);
    char* const begin = data() + offset;
    const auto is_guard = [](char c) { return c == guard; };
    return std::all_of(bytes_, begin, is_guard) && std::all_of(begin + n, bytes_ + nbytes_, is_guard);
  }

 private:
  char* bytes_ = nullptr;
  size_t nbytes_ = 0;
};

// A rank of one communicator.
struct Rank : Outcome {
  u32 number, communicator;
  Rank* of_communicator;  // its ranks
  Region scratch, input, output;
  Counters counters{};
  u32 abort = 0;
  std::vector<u64> ended_at;  // by call, the step
  std::vector<u64> scratch_hashes;  // after each call with an absent rank, once it has ended on all ranks
  std::vector<std::string> inputs, operands, results;  // by call
};

Case the_case;
std::vector<Call> calls;
std::vector<Rank> ranks;  // of the first communicator, then of the next one
std::vector<std::atomic<u32>> meetings;  // two for each call: the ranks that have come

std::string read(std::ifstream& file, size_t nbytes) {
  std::string bytes(nbytes, 0);
  file.read(bytes.data(), nbytes);
  return bytes;
}

void read_case(const char* path) {
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(&the_case), sizeof the_case);
  calls.resize(the_case.calls);
  ranks.resize(the_case.world_size * the_case.communicators);
  file.read(reinterpret_cast<char*>(calls.data()), calls.size() * sizeof(Call));
  for (const Call& call : calls)
    for (u32 r = 0; r < the_case.world_size; ++r) {
      const std::string input = read(file, call.input_nbytes[r]);
      for (u32 m = r; m < ranks.size(); m += the_case.world_size) ranks[m].inputs.push_back(input);
    }
  for (const Call& call : calls) {
    const std::string operands = read(file, call.operand_nbytes);
    for (Rank& rank : ranks) rank.operands.push_back(operands);
  }
  if (file) return;
  std::fprintf(stderr, "the case ends early\n");
  std::exit(3);
}

void prepare(Rank& rank) {
  const u32 m = &rank - ranks.data();
  rank.number = m % the_case.world_size;
  rank.communicator = m / the_case.world_size;
  rank.of_communicator = &rank - rank.number;
  rank.scratch.allocate(the_case.scratch_nbytes);
  rank.scratch.close();
  rank.scratch.open(0, the_case.scratch_nbytes);
  if (!the_case.suspended) std::memset(rank.scratch.data(), the_case.fill, the_case.scratch_nbytes);
  rank.input.allocate(the_case.tensor_nbytes);
  rank.output.allocate(the_case.tensor_nbytes);
  rank.results.resize(the_case.calls);
  rank.ended_at.resize(the_case.calls);
  for (EpochState& state : rank.counters.epoch_state) state = {the_case.epoch, the_case.suspended};
  for (u32& steps : rank.counters.steps) steps = the_case.epoch;
  for (u32& busy : rank.counters.busy) busy = the_case.busy || the_case.suspended;
  rank.abort = the_case.aborted;
  if (!the_case.has_pad || the_case.suspended) return;
  u64* flags = reinterpret_cast<u64*>(rank.scratch.data());
  for (int i = 0; i < max_blocks * max_ranks; ++i) flags[i] = u64(2 * the_case.epoch) << 32;  // (25)
}

Region& region_of_output(const Call& call, Rank& rank) { return call.in_place ? rank.input : rank.output; }

char* input_of(const Call& call, Rank& rank) { return rank.input.data() + call.input_offset[rank.number]; }

char* output_of(const Call& call, Rank& rank) {
  return region_of_output(call, rank).data() + call.output_offset[rank.number];
}

Arguments arguments_of(u32 c, Rank& rank) {
  const Call& call = calls[c];
  Arguments a{};
  a.input = input_of(call, rank);
  a.output = output_of(call, rank);
  a.numel = call.numel;
  a.timeout_ns = call.timeout_ns;
  a.seed = call.seed;
  a.capacity = call.capacity;
  a.chunk = call.chunk;
  for (u32 p = 0; p < the_case.world_size; ++p) {
    Rank& peer = rank.of_communicator[p];
    a.scratch[p] = peer.scratch.data();
    a.ring[p] = rank.of_communicator[(rank.number + p) % the_case.world_size].scratch.data();
    a.peer_output[p] = output_of(call, peer);
    a.peer_counters[p] = &peer.counters;
    a.begin[p] = call.begin[p];
    a.count[p] = call.count[p];
  }
  for (int i = 0; i < max_operands; ++i) {
    const u64 offset = call.operand_offset[i], in_output = u64(1) << 63;
    const char* const begin = offset < in_output ? rank.operands[c].data() : static_cast<const char*>(a.output);
    a.epilogue.tensor[i] = ~offset ? begin + offset % in_output : a.input;
    a.epilogue.scalar[i] = call.scalar[i];
  }
  a.epilogue.columns = call.columns;
  a.epilogue.skipped = call.skipped;
  a.epilogue.pitch = call.columns;
  a.errors = input_of(call, rank) + call.errors_at;
  a.multicast = simulator::multicast.base;
  a.counters = &rank.counters;
  a.abort = &rank.abort;
  a.record = &rank.record;
  a.rank = rank.number;
  a.world_size = the_case.world_size;
  a.fingerprint = call.fingerprint[rank.number];
  return a;
}

// The kernel before each call in its stream. It refills the tensors, which all calls share.
void fill(u32 c, Rank& rank) {
  release_next_kernel();
  wait_for_previous_kernel();
  const Call& call = calls[c];
  const u32 r = rank.number;
  for (Region* region : {&rank.input, &rank.output}) region->close();
  rank.input.open(call.input_offset[r], call.input_nbytes[r]);
  region_of_output(call, rank).open(call.output_offset[r], call.output_nbytes[r]);
  for (int i = 0; i < 64; ++i) simulator::step_after_load();  // the call has begun, and finds no input yet
  const u64 begin = global_time_ns(), late_ns = r + 1 == the_case.world_size ? call.late_ns : 0;
  while (global_time_ns() - begin < late_ns) simulator::step_after_load();
  std::memcpy(input_of(call, rank), rank.inputs[c].data(), rank.inputs[c].size());
}

void meet_ranks(std::atomic<u32>& meeting) {
  ++meeting;
  while (meeting.load() < the_case.world_size) simulator::step_after_load();
}

// The kernel after each call. It saves the result, and checks that nothing was written outside the windows.
void collect(u32 c, Rank& rank) {
  wait_for_previous_kernel();
  const Call& call = calls[c];
  const u32 r = rank.number;
  if (call.absent) {
    meet_ranks(meetings[2 * c]);
    const std::string_view scratch(rank.scratch.data(), the_case.scratch_nbytes);
    rank.scratch_hashes.push_back(std::hash<std::string_view>()(scratch));
    meet_ranks(meetings[2 * c + 1]);
  }
  rank.ended_at[c] = simulator::step_number();
  rank.results[c].assign(output_of(call, rank), call.output_nbytes[r]);
  rank.broken_guards += !rank.scratch.intact(0, the_case.suspended ? 0 : the_case.scratch_nbytes);
  const u64 written = std::max(call.output_nbytes[r], call.in_place ? call.input_nbytes[r] : 0);
  rank.broken_guards += !region_of_output(call, rank).intact(call.output_offset[r], written);
  if (call.in_place && !call.feeds_back) return;
  rank.broken_guards += !rank.input.intact(call.input_offset[r], call.input_nbytes[r]);
  if (call.feeds_back)
    rank.results[c].append(input_of(call, rank), call.input_nbytes[r]);
  else
    rank.broken_guards += std::memcmp(input_of(call, rank), rank.inputs[c].data(), rank.inputs[c].size()) != 0;
}

simulator::Kernel launch_of(u32 c, Rank& rank) {
  const Call& call = calls[c];
  return {.blocks = call.blocks[rank.number],
          .threads = call.threads,
          .shared_nbytes = call.shared_nbytes,
          .body = [&call, a = arguments_of(c, rank)] { kernels[call.kernel](a); },
          .cluster = call.cluster,
          .places = call.places,
          .waits = call.waits != 0,
          .given = rank.inputs[c].data(),
          .call = int(c)};
}

// A kernel of the host's side. Beside those of several communicators it takes no place of theirs.
simulator::Kernel on_the_side(std::function<void()> body) {
  return {.blocks = 1, .threads = 1, .shared_nbytes = 0, .body = body, .places = the_case.communicators == 1};
}

// The first kernel of a stream. Each rank launches its communicators in another order, rotated by its number.
void wait_for_turn(const Rank& rank) {
  const u32 n = the_case.communicators, turn = (rank.communicator + n - rank.number % n) % n;
  const u64 begin = global_time_ns();
  while (global_time_ns() - begin < turn * apart_ns) simulator::step_after_load();
}

std::vector<simulator::Kernel> stream_of(Rank& rank) {
  std::vector<simulator::Kernel> stream;
  if (the_case.communicators > 1) stream.push_back(on_the_side([&] { wait_for_turn(rank); }));
  for (u32 c = 0; c < the_case.calls; ++c) {
    const Call& call = calls[c];
    stream.push_back(on_the_side([c, &rank] { fill(c, rank); }));
    if (!(call.absent >> rank.number & 1)) stream.push_back(launch_of(c, rank));
    if (call.next_blocks)
      stream.push_back({.blocks = call.next_blocks,
                        .threads = 1,
                        .shared_nbytes = 0,
                        .body = [] { wait_for_previous_kernel(); },
                        .places = call.places});
    stream.push_back(on_the_side([c, &rank] { collect(c, rank); }));
  }
  return stream;
}

std::vector<simulator::Kernel> second_stream_of(Rank& rank) {
  std::vector<simulator::Kernel> stream;
  for (u32 c = 0; c < the_case.calls; ++c)
    if (calls[c].twice >> rank.number & 1) stream.push_back(launch_of(c, rank));
  return stream;
}

// Counts polls of unmarked blocks: a call that began now would see no other one, and could take this thread's data.
void look_at_mark() {
  const simulator::Thread& me = simulator::self();
  Rank& rank = ranks[me.stream % ranks.size()];
  if (__atomic_load_n(&rank.counters.busy[me.block.x], __ATOMIC_RELAXED) == 0)
    __atomic_fetch_add(&rank.unmarked_polls, 1, __ATOMIC_RELAXED);
  if (simulator::has_released()) __atomic_fetch_add(&rank.released_polls, 1, __ATOMIC_RELAXED);
}

// Counts what a rank stores into another rank's scratch, by relaxed stores and by copies.
void look_at_target(const void* address, u32 nbytes) {
  Rank& mine = ranks[simulator::self().stream % ranks.size()];
  for (Rank& rank : ranks) {
    const char* const first = rank.scratch.data();
    if (&rank != &mine && first <= address && address < first + the_case.scratch_nbytes)
      __atomic_fetch_add(&mine.sent_nbytes, nbytes, __ATOMIC_RELAXED);
  }
}

void look_at_records() {
  for (Rank& rank : ranks)
    if (rank.seen.kind == 0 && __atomic_load_n(&rank.record.kind, __ATOMIC_ACQUIRE)) {
      rank.seen = rank.record;
      rank.gave_up_at = simulator::step_number();
    }
}

u64* shown;  // the third file: the step; for each rank where scratch, input and output begin; the multicast addresses
u64 last_step = 0;

void look() {
  shown[0] = simulator::step_number();
  look_at_records();
  if (last_step == 0 || simulator::step_number() < last_step) return;
  std::fputs(simulator::last_steps().c_str(), stderr);
  std::_Exit(0);
}

void show_in(const char* path) {
  const size_t nbytes = (2 + 3 * ranks.size()) * sizeof(u64);
  const int file = open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, nbytes)) std::exit(3);
  void* const mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) std::exit(3);
  shown = static_cast<u64*>(mapped);
  u64* at = shown;
  for (Rank& rank : ranks)
    for (Region* region : {&rank.scratch, &rank.input, &rank.output}) *++at = reinterpret_cast<u64>(region->data());
  *++at = reinterpret_cast<u64>(simulator::multicast.base);
}

void write_results(const char* path) {
  std::ofstream file(path, std::ios::binary);
  for (const Rank& rank : ranks) {
    file.write(reinterpret_cast<const char*>(static_cast<const Outcome*>(&rank)), sizeof(Outcome));
    file.write(reinterpret_cast<const char*>(rank.ended_at.data()), rank.ended_at.size() * sizeof(u64));
    file.write(reinterpret_cast<const char*>(rank.scratch_hashes.data()), rank.scratch_hashes.size() * sizeof(u64));
    for (const std::string& result : rank.results) file.write(result.data(), result.size());
  }
}

}  // namespace

int main(int count, char** argv) {
  read_case(argv[1]);
  simulator::are_noted = count > 4;
  if (simulator::are_noted) last_step = std::stoull(argv[4]);
  meetings = std::vector<std::atomic<u32>>(2 * the_case.calls);
  for (Rank& rank : ranks) prepare(rank);
  simulator::pump = twin::pump;
  simulator::end_of_thread = twin::end_of_thread;
  twin::look_at_poll = look_at_mark;
  simulator::not_noted = {ranks.data(), ranks.data() + ranks.size()};  // counters and records
  simulator::look_at_store = look_at_target;
  const size_t nbytes = std::max<size_t>(the_case.scratch_nbytes, 1);
  simulator::multicast.base = static_cast<char*>(mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  for (Rank& rank : ranks) simulator::multicast.scratch.push_back(rank.scratch.data());
  show_in(argv[3]);
  std::vector<std::vector<simulator::Kernel>> streams;
  for (Rank& rank : ranks) streams.push_back(stream_of(rank));
  for (Rank& rank : ranks) streams.push_back(second_stream_of(rank));
  u64 patience_ns = 0;  // longer than any wait that has a deadline
  for (const Call& call : calls) patience_ns = std::max(patience_ns, (call.timeout_ns + call.late_ns) / 4 * 5);
  const simulator::End end =
      simulator::run(streams, the_case.world_size, the_case.room, the_case.seed, patience_ns, look);
  if (end != simulator::complete) {
    const bool all_wait = end == simulator::stuck;
    std::fprintf(stderr, "stuck: the threads %s\n", all_wait ? "wait for one another" : "wait without a deadline");
    std::_Exit(4);  // the threads are left as they are
  }
  for (auto& words : twin::order_of_kernels)
    for (auto& word : words) word.load(std::memory_order_acquire);
  write_results(argv[2]);
  return 0;
}
