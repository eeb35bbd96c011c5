// The kernels of local_codec.cu with the arguments of a collective. The numbers are the source, the call, the first
// tile, and the bytes before a tensor that is encoded, or the number of messages and the bytes from one to the next.
#include "quantized/local_codec.cu"

template <class T, class C>
void one_local_codec_encode(Arguments a) {
  const auto number = [&](int at) { return u64(a.epilogue.scalar[at]); };
  char* const tensor = static_cast<char*>(const_cast<void*>(a.input)) + number(3);
  char* const wire = static_cast<char*>(a.output);
  const u32 call = number(1), source = number(0);
  local_codec_encode<T, C>({tensor, wire, nullptr, 0, a.numel, number(2), a.seed, 0, call, source});
}

// What a sum is encoded to comes first in the output, then what this decodes to.
template <class T, class C, bool Encodes>
void one_local_codec_sum(Arguments a) {
  const auto number = [&](int at) { return u64(a.epilogue.scalar[at]); };
  const u64 nbytes = Encodes ? tile_count(a.numel) * (WireLayout<C>::codes_nbytes + WireLayout<C>::scales_nbytes) : 0;
  char *const wire = static_cast<char*>(a.output), *const tensor = wire + nbytes;
  const char* const messages = static_cast<const char*>(a.input);
  const u32 call = number(1), count = number(0);
  local_codec_sum<T, C, Encodes>({tensor, wire, messages, number(3), a.numel, number(2), a.seed, count, call, 0});
}
