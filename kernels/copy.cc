#include "kernels/copy.h"

#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tide {
namespace {

using StreamRow = void (*)(std::byte* to, const std::byte* from, int64_t bytes);

#if defined(__x86_64__)

constexpr int64_t kLineBytes = 64;

// Bytes before the first whole cache line of the destination.
int64_t head_bytes(const std::byte* to, int64_t bytes) {
  const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & (kLineBytes - 1));
  return head < bytes ? head : bytes;
}

__attribute__((target("avx512f"))) void stream_row_avx512(std::byte* to, const std::byte* from,
                                                          int64_t bytes) {
  const int64_t head = head_bytes(to, bytes);
  std::memcpy(to, from, static_cast<size_t>(head));
  int64_t i = head;
  for (; i + 4 * kLineBytes <= bytes; i += 4 * kLineBytes) {
    const __m512i a = _mm512_loadu_si512(from + i);
    const __m512i b = _mm512_loadu_si512(from + i + 64);
    const __m512i c = _mm512_loadu_si512(from + i + 128);
    const __m512i d = _mm512_loadu_si512(from + i + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 192), d);
  }
  std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
}

__attribute__((target("avx2"))) void stream_row_avx2(std::byte* to, const std::byte* from,
                                                     int64_t bytes) {
  const int64_t head = head_bytes(to, bytes);
  std::memcpy(to, from, static_cast<size_t>(head));
  int64_t i = head;
  for (; i + 2 * kLineBytes <= bytes; i += 2 * kLineBytes) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
    const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 64));
    const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 96));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), b);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 64), c);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 96), d);
  }
  std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
}

void stream_row_sse2(std::byte* to, const std::byte* from, int64_t bytes) {
  const int64_t head = head_bytes(to, bytes);
  std::memcpy(to, from, static_cast<size_t>(head));
  int64_t i = head;
  for (; i + kLineBytes <= bytes; i += kLineBytes) {
    for (int64_t j = i; j < i + kLineBytes; j += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + j),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
    }
  }
  std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
}

StreamRow stream_row(CpuLevel level) {
  if (level == CpuLevel::kAvx512) return stream_row_avx512;
  if (level == CpuLevel::kAvx2) return stream_row_avx2;
  return stream_row_sse2;
}

void order_streamed_stores() { _mm_sfence(); }

#else

StreamRow stream_row(CpuLevel) {
  return [](std::byte* to, const std::byte* from, int64_t bytes) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  };
}

void order_streamed_stores() {}

#endif

}  // namespace

void copy_block(const CopyBlock& block, CpuLevel level) {
  if (block.rows <= 0 || block.row_bytes <= 0) return;
  auto* to = static_cast<std::byte*>(block.to);
  const auto* from = static_cast<const std::byte*>(block.from);
  int64_t rows = block.rows;
  int64_t row_bytes = block.row_bytes;
  if (rows > 1 && block.to_pitch == row_bytes && block.from_pitch == row_bytes) {
    row_bytes *= rows;  // no gaps: one long row
    rows = 1;
  }
  const bool stream = row_bytes >= kStreamRowBytes && rows * row_bytes >= kStreamBlockBytes;
  const StreamRow copy_streamed = stream_row(level);
  for (int64_t row = 0; row < rows; ++row) {
    if (stream) {
      copy_streamed(to, from, row_bytes);
    } else {
      std::memcpy(to, from, static_cast<size_t>(row_bytes));
    }
    to += block.to_pitch;
    from += block.from_pitch;
  }
  if (stream) order_streamed_stores();
}

}  // namespace tide
