// Every level of cast against the definition, over all 16-bit values and random fp32 bits.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/cast.h"

namespace tide {
namespace {

// The value of a half by arithmetic.
double half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

bool is_nan_half(uint16_t bits) { return (bits & 0x7fff) > 0x7c00; }
bool is_nan_bf16(uint16_t bits) { return (bits & 0x7fff) > 0x7f80; }

// The nearest of the two neighbours in a 16-bit format, ties to the even one. `value_of` gives a
// finite pattern's value; patterns of one sign are ordered like their values, so the search is over
// patterns.
template <class ValueOf>
uint16_t nearest(float value, uint16_t infinity, ValueOf value_of, double past_largest) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  uint32_t low = 0;
  uint32_t high = infinity;  // stands for past_largest, the value that one more step would have
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (value_of(static_cast<uint16_t>(middle)) <= magnitude ? low : high) = middle;
  }
  const double below = value_of(static_cast<uint16_t>(low));
  const double above = high == infinity ? past_largest : value_of(static_cast<uint16_t>(high));
  const double to_below = magnitude - below;
  const double to_above = above - magnitude;
  const bool up = to_above < to_below || (to_above == to_below && (low & 1) != 0);
  return static_cast<uint16_t>(sign | (up ? high : low));
}

double bf16_value(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

uint16_t to_bf16(float value) {
  if (std::isnan(value)) return 0x7fc0;
  if (std::isinf(value)) return value < 0 ? 0xff80 : 0x7f80;
  return nearest(value, 0x7f80, bf16_value, std::ldexp(1, 128));
}

uint16_t to_half(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) {
    return static_cast<uint16_t>(((bits >> 16) & 0x8000) | 0x7e00 | ((bits >> 13) & 0x3ff));
  }
  if (std::fabs(value) >= 65536) return value < 0 ? 0xfc00 : 0x7c00;
  return nearest(value, 0x7c00, half_value, 65536);
}

std::vector<uint32_t> fp32_samples() {
  std::mt19937 engine(3);
  std::vector<uint32_t> bits;
  for (int i = 0; i < 200000; ++i) bits.push_back(static_cast<uint32_t>(engine()));
  for (int i = 0; i < 200000; ++i) {  // where fp16 has denormals, ties and its end
    const uint32_t exponent = 98 + static_cast<uint32_t>(engine()) % 48;
    const uint32_t mantissa = (static_cast<uint32_t>(engine()) % 4096) << (11 - engine() % 12);
    bits.push_back((static_cast<uint32_t>(engine()) & 0x80000000u) | (exponent << 23) |
                   (mantissa & 0x7fffff));
  }
  for (uint32_t i = 0; i < 65536; ++i) {  // bf16 ties and their neighbours
    for (uint32_t low : {0x7fffu, 0x8000u, 0x8001u}) bits.push_back((i << 16) | low);
  }
  return bits;
}

template <class To, class From>
std::vector<To> cast(const std::vector<From>& from, DType from_dtype, DType to_dtype,
                     CpuLevel level) {
  std::vector<To> to(from.size());
  const CastBlock block{to.data(), from.data(), static_cast<int64_t>(from.size()), to_dtype,
                        from_dtype};
  const Status status = cast_block(block, level);
  EXPECT_TRUE(status.is_ok()) << status.to_string();
  return to;
}

class Cast : public testing::TestWithParam<CpuLevel> {};

TEST_P(Cast, NarrowsToTheNearest) {
  const std::vector<uint32_t> bits = fp32_samples();
  const auto bf16 = cast<uint16_t>(bits, DType::kFloat32, DType::kBFloat16, GetParam());
  const auto half = cast<uint16_t>(bits, DType::kFloat32, DType::kFloat16, GetParam());
  for (size_t i = 0; i < bits.size(); ++i) {
    const float value = std::bit_cast<float>(bits[i]);
    ASSERT_EQ(bf16[i], to_bf16(value)) << std::hex << bits[i];
    ASSERT_EQ(half[i], to_half(value)) << std::hex << bits[i];
  }
}

TEST_P(Cast, WidensExactly) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const auto from_bf16 = cast<uint32_t>(all, DType::kBFloat16, DType::kFloat32, GetParam());
  const auto from_half = cast<uint32_t>(all, DType::kFloat16, DType::kFloat32, GetParam());
  const auto back = cast<uint16_t>(from_half, DType::kFloat32, DType::kFloat16, GetParam());
  const auto half_to_bf16 = cast<uint16_t>(all, DType::kFloat16, DType::kBFloat16, GetParam());
  const auto bf16_to_half = cast<uint16_t>(all, DType::kBFloat16, DType::kFloat16, GetParam());
  for (uint32_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(from_bf16[i], i << 16);
    const auto half = static_cast<uint16_t>(i);
    if (is_nan_half(half)) {
      ASSERT_EQ(from_half[i], ((i & 0x8000) << 16) | 0x7fc00000 | ((i & 0x3ff) << 13));
      ASSERT_EQ(back[i], half | 0x200);
    } else {
      if ((i & 0x7fff) != 0x7c00) {
        ASSERT_EQ(std::bit_cast<float>(from_half[i]), half_value(half));
      }
      ASSERT_EQ(back[i], half);
    }
    ASSERT_EQ(half_to_bf16[i], to_bf16(std::bit_cast<float>(from_half[i])));
    ASSERT_EQ(is_nan_bf16(half), (bf16_to_half[i] & 0x7fff) > 0x7c00);
    if (!is_nan_bf16(half)) {
      ASSERT_EQ(bf16_to_half[i], to_half(std::bit_cast<float>(i << 16)));
    }
  }
}

TEST_P(Cast, DoublesAndTailsAndAlignment) {
  std::mt19937_64 engine(5);
  std::normal_distribution<double> normal(0, 100);
  for (size_t numel = 0; numel < 80; ++numel) {
    std::vector<double> wide(numel);
    std::vector<uint32_t> bits(numel);
    std::vector<std::byte> shifted(numel * 4 + 3);
    for (size_t i = 0; i < numel; ++i) {
      wide[i] = normal(engine);
      bits[i] = static_cast<uint32_t>(engine());
    }
    if (numel > 0) std::memcpy(shifted.data() + 3, bits.data(), numel * 4);
    const auto narrow = cast<uint16_t>(wide, DType::kFloat64, DType::kBFloat16, GetParam());
    const auto same = cast<double>(wide, DType::kFloat64, DType::kFloat64, GetParam());
    const auto widened = cast<double>(narrow, DType::kBFloat16, DType::kFloat64, GetParam());
    for (size_t i = 0; i < numel; ++i) {
      ASSERT_EQ(narrow[i], to_bf16(static_cast<float>(wide[i])));
      ASSERT_EQ(widened[i], bf16_value(narrow[i]));
      ASSERT_EQ(same[i], wide[i]);
    }
    std::vector<std::byte> to(numel * 2 + 4, std::byte{0x5a});
    const CastBlock block{to.data() + 1, shifted.data() + 3, static_cast<int64_t>(numel),
                          DType::kFloat16, DType::kFloat32};
    ASSERT_TRUE(cast_block(block, GetParam()).is_ok());
    for (size_t i = 0; i < numel; ++i) {
      uint16_t got;
      std::memcpy(&got, to.data() + 1 + i * 2, 2);
      ASSERT_EQ(got, to_half(std::bit_cast<float>(bits[i])));
    }
    EXPECT_EQ(to[0], std::byte{0x5a});
    EXPECT_EQ(to[numel * 2 + 1], std::byte{0x5a});
  }
}

TEST_P(Cast, OtherTypesAreRefused) {
  int value = 1;
  float output = 2;
  const CastBlock block{&output, &value, 1, DType::kFloat32, DType::kInt32};
  EXPECT_EQ(cast_block(block, GetParam()).kind(), ErrorKind::kUnsupported);
  EXPECT_EQ(output, 2);
}

INSTANTIATE_TEST_SUITE_P(Levels, Cast, testing::ValuesIn(usable_cpu_levels()),
                         [](const auto& level) {
                           return std::string(cpu_level_name(level.param));
                         });

}  // namespace
}  // namespace tide
