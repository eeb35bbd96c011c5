// The structs that kernels receive. graphar/runtime/arguments.py mirrors them; every kernel is compiled with a check.
#pragma once
#include "device/ptx/ptx.cuh"

// Of the headers that kernels from outside the package may include (docs/pages/primitives.md). It changes where such a
// kernel may need a change; a kernel may require it: `static_assert(interface_version == 1);`.
constexpr int interface_version = 1;

constexpr int max_ranks = 8;
constexpr int max_blocks = 256;
constexpr int max_operands = 4;
constexpr int max_tensors = 4;
constexpr int kept_calls = 16;

// Internal: why a kernel gave up, in host-visible memory. `kind` is written last.
struct Record {
  u32 kind;  // 0: none; else timed_out, overlapped or disagreed (record.cuh)
  u32 algorithm;
  u32 sequence;  // calls of this algorithm before this one
  u32 rank;
  u32 peer;
  u32 block;
  u32 expected;
  u32 seen;
};

// Internal: read by a block, in one load, before it sends anything.
struct EpochState {
  u32 epoch;    // number of calls; equal in all entries between kernels
  u32 aborted;  // 1 once a call has given up waiting
};

// Internal: device memory of one rank, for one algorithm of one communicator.
struct Counters {
  EpochState epoch_state[max_blocks];
  u32 steps[max_blocks];  // steps this block has signalled; the same on every rank
  u32 busy[max_blocks];   // 1 while a block of this index runs: (22) in call.cuh
  // By rank, and epoch modulo kept_calls: what the rank called, as epoch + 1 and a fingerprint, or 0 (record.cuh).
  u64 called[max_ranks][kept_calls];
};

// Internal: the arguments of an epilogue (epilogue.cuh).
struct EpilogueArguments {
  const void* tensor[max_operands];
  float scalar[max_operands];
  u64 columns;  // of the tensor, seen as rows of its last dimension
  u64 skipped;  // elements of this rank's part that earlier launches of the call handle
  u64 first_row, first_col;  // of the tensor in the whole one that `row` and `col` of the expression refer to; else 0
  u64 pitch;                 // columns of the whole tensor
};

// The arguments of every collective kernel, the same on every rank where nothing else is said.
struct Arguments {
  // First what every call needs: three lines of constant memory (wait_for_previous_kernel in kernel_order.cuh).
  const void* input;                   // this rank's tensor or, in an all-gather, its part; at any alignment
  void* output;                        // this rank's result; at any alignment
  u64 numel;                           // elements of T in the whole tensor: in all parts, if the op has parts
  Counters* counters;                  // of this algorithm, on this rank
  u32 capacity;                        // packs, or boxes, in one slot of the scratch
  u32 rank;                            // this one, below N
  u32 fingerprint;                     // of the call: equal where ranks call the same; not 0
  u32 algorithm;                       // its index, for the record
  char* ring[max_ranks];               // this algorithm's scratch by distance: of rank (rank + hop) % N
  Counters* peer_counters[max_ranks];  // the same on every rank; null beyond the last

  u64 timeout_ns;                     // of each wait for a peer
  u64 seed;                           // of a codec with stochastic rounding
  u32 chunk;                          // packs, or tiles, that a block sends one peer in one step of a pipeline
  u32 world_size;                     // N
  char* scratch[max_ranks];           // the same as ring, by rank
  char* multicast;                    // multicast address of the scratch of all ranks; multimem kernels only, else null
  const char* peer_input[max_ranks];  // the tensors that sum_of_parts adds, all on this GPU; else null
  char* peer_output[max_ranks];       // the output on every rank; direct kernels only, else null
  u64 begin[max_ranks];  // of each rank's part in the whole tensor, if the op has parts: in elements, or rows
  u64 count[max_ranks];  // elements, or rows, of each part that this launch handles
  u32* abort;            // of this rank: set once a wait has expired, so that queued kernels end at once
  Record* record;        // of this rank, in host-visible memory
  void* errors;          // like the input: the rounding errors of earlier calls; of a codec with feedback only
  EpilogueArguments epilogue;  // of calls with one (epilogue.cuh)
};

// Internal: the arguments of an all-gather of several tensors, whose part of a rank is the packs of the first tensor,
// then those of the next (parts.cuh). `count` is 16 bytes for each of these packs.
struct TupleArguments : Arguments {
  const void* inputs[max_tensors];
  void* outputs[max_tensors];
  u64 row_nbytes[max_tensors];  // 0 past the last tensor
  u64 first_row[max_ranks];     // of each rank's part, in every tensor
  u64 rows[max_ranks];          // of each rank's part
};

// Internal: where a part of an all-to-all lies in a tensor, in bytes: in runs, with a gap behind each (parts.cuh).
struct Runs {
  u64 begin;
  u64 nbytes;
  u64 run, gap;  // of a gap 0: the part is one run
  u32 whole;      // packs that may move as 16 bytes if the tensor is aligned
  u32 run_packs;  // of a run, where `whole` is not 0
};

// Internal: the arguments of an all-to-all.
struct ExchangeArguments : Arguments {
  Runs sends[max_ranks];     // the part for each rank, in the input
  Runs receives[max_ranks];  // the part from each rank, in the output
  u64 most;                  // bytes of the largest part between any two ranks; 0: ranks know only their own parts
  // Without `most`: what stands for the part for each rank, and from each rank, the same on both.
  u32 sent_words[max_ranks], received_words[max_ranks];
};

// Internal: the arguments of a norm of a sum's rows (rms_norm.cuh).
struct NormArguments : Arguments {
  const void* residual;
  const void* weight;  // of one row
  void* summed;
  const float* scale;  // the caller's, of static_fp8; else null
  float* scales;       // written, of dynamic_fp8 and grouped_fp8; else null
  u64 columns;
  u64 skipped;  // elements of residual, `summed` and rows with scales that earlier launches of the call have normed
  float eps, weight_offset;
};

// Internal: the arguments of a norm's gradients (residual_rmsnorm_backward.cu). Tensors are aligned to 16 bytes.
struct NormGradientArguments {
  const void* of_normed;
  const void* of_summed;  // null: zeros
  const void* summed;
  const void* weight;
  void* of_rows;
  float* groups;    // [row_groups][columns]
  void* of_weight;  // of one row
  u64 rows, columns;
  u32 row_groups;
  u32 with_weight;  // whether the last two are written
  float eps;
  float weight_offset;
};

// Internal: the arguments of the kernels of softmax (softmax.cuh). The addresses come first.
struct LossArguments {
  const void* logits;        // [rows, columns], of this rank
  const long long* target;   // of each row, in the columns of the whole vocabulary
  float* partials;           // [rows, width], written; null if there is one rank, whose results are written instead
  const float* gathered;     // [ranks, rows, width]
  float* results;            // of each row; with room for sums of 128 of them, and so on, if these are added
  float* state;              // m and s of each row, then the number of rows that have a loss, if they are added
  float* entropy;            // of each row
  long long* top1;           // of each row
  float* total;              // the sum or the mean
  const float* upstream;     // of each row, or one number
  void* gradient;            // like the logits
  long long ignore_index;
  double label_smoothing, lse_square_scale;
  float inverse_temperature;
  float all_share, target_share;  // label_smoothing / vocab_size, 1 - label_smoothing
  u32 rows, columns;
  u32 first;                 // this rank's first column of the vocabulary
  u32 vocab_size;            // columns that are no padding
  u32 real_columns;          // of this rank, that are no padding
  u32 leaf_columns;
  u32 leaves_log2, ranks;    // leaves of this rank
  u32 cluster_log2;          // blocks that divide 8 leaves
  u32 slices;                // blocks that divide a row's gradient
  u32 width;                 // numbers of a partial
  u32 may_ignore, is_loss, is_mean, is_per_row, with_entropy, with_top1;
};

// Internal: the arguments of matmul beside the tensor maps of A [m, k], of W and of C [m, n].
struct MatmulArguments {
  const void* bias;  // n elements of C's type, or null
  u32 m, n, k;
  u32 group_rows;  // rows of tiles that are walked together, column by column
  u64 unused = 0;  // the fields after it keep their offsets, and kernels their machine code
  // Whether the caller promises that W is constant: (26) in kernel_order.cuh. Only skinny kernels read it.
  u32 constant_weight = 0;
  // C's first element, and the elements from a row to the next. Only split tiles read them.
  u32 c_leading = 0;
  void* c = nullptr;
  u32 first_tile = 0, end_tile = 0;  // which tiles the grid computes, of a kernel with several leaves
};

// Internal: the arguments of a matmul of e4m3 operands. A scale's strides are in elements: from the scale of a row, or
// of a block of rows, to the next, and of a block of K to the next. 0: one serves all.
struct ScaledMatmulArguments : MatmulArguments {
  const float* a_scale;
  const float* w_scale;
  u64 a_scale_row, a_scale_block, w_scale_row, w_scale_block;
  float* gathered_scales = nullptr;  // takes the scales of gathered rows, by rows, if these are wanted
};

// Internal: template argument of kernels that store results straight into every rank's output, a symmetric tensor.
constexpr bool direct = true;
