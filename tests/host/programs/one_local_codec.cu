// The kernels of local_codec.cu with the arguments of a collective. The numbers are the source, the call, the first
// tile, and the bytes before a tensor that is encoded, or the number of messages and the bytes from one to the next.
#include "quantized/local_codec.cu"

template <class T, class C>
void one_local_codec_encode(Arguments a) {
  const auto number = [&](int at) { return u64(a.epilogue.scalar[at]); };
  char* const tensor = static_cast<char*>(const_cast<void*>(a.input)) + number(3);
  local_codec_encode<T, C>({tensor, static_cast<char*>(a.output), nullptr, 0, a.numel, number(2), a.seed, 0, u32(number(1)),
                      u32(number(0))});
}

// What a sum is encoded to comes first in the output, then what this decodes to.
template <class T, class C, bool Encodes>
void one_local_codec_sum(Arguments a) {
  const auto number = [&](int at) { return u64(a.epilogue.scalar[at]); };
  const u64 nbytes = Encodes ? tile_count(a.numel) * (WireLayout<C>::codes_nbytes + WireLayout<C>::scales_nbytes) : 0;
  char* const output = static_cast<char*>(a.output);
  local_codec_sum<T, C, Encodes>({output + nbytes, output, static_cast<const char*>(a.input), number(3), a.numel, number(2),
                            a.seed, u32(number(0)), u32(number(1)), 0});
}
