// Every level of accumulate against a sum written out element by element here, over random bits:
// NaNs, infinities and denormals included; every alignment, tail, slice count, type pair and mode.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/accumulate.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tide {
namespace {

// The reference's own conversions: by exact arithmetic in double, not by the kernels' bit tricks.
double decode(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const bool negative = ((bits >> (mantissa_bits + exponent_bits)) & 1) != 0;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  double value;
  if (exponent == (1 << exponent_bits) - 1) {
    value = mantissa != 0 ? std::nan("") : INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1u << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return negative ? -value : value;
}

// Rounds to nearest even, for any value that a float holds; NaN gives the positive quiet NaN.
uint32_t encode(float value, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  if (std::isnan(value)) return infinity | (1u << (mantissa_bits - 1));
  const uint32_t sign = std::signbit(value) ? 1u << (exponent_bits + mantissa_bits) : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(magnitude)) return sign | infinity;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), 1 - bias);  // of the value's binade
  const double steps = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
  // A value of `steps` units: a denormal below 2^mantissa_bits, and a carry into the next exponent
  // adds up by itself.
  const auto result = static_cast<uint32_t>(exponent + bias - 1) * (1u << mantissa_bits) +
                      static_cast<uint32_t>(steps);
  return sign | std::min(result, infinity);
}

float read(DType dtype, const std::byte* at) {
  uint32_t bits = 0;
  std::memcpy(&bits, at, static_cast<size_t>(dtype_bytes(dtype)));
  if (dtype == DType::kFloat32) return std::bit_cast<float>(bits);
  return static_cast<float>(dtype == DType::kBFloat16 ? decode(bits, 8, 7) : decode(bits, 5, 10));
}

void write(DType dtype, std::byte* at, float value) {
  uint32_t bits = 0;
  if (dtype == DType::kFloat32) {
    bits = std::isnan(value) ? 0x7fc00000u : std::bit_cast<uint32_t>(value);
  } else {
    bits = dtype == DType::kBFloat16 ? encode(value, 8, 7) : encode(value, 5, 10);
  }
  std::memcpy(at, &bits, static_cast<size_t>(dtype_bytes(dtype)));
}

class Bits {
 public:
  explicit Bits(uint64_t seed) : engine_(seed) {}

  // Random bits; one element in four of a kind that rounding and adding find hard.
  void fill(DType dtype, std::byte* to, int64_t numel) {
    const int64_t bytes = dtype_bytes(dtype);
    for (int64_t i = 0; i < numel; ++i) {
      uint64_t bits = engine_();
      if (engine_() % 4 == 0) bits = hard(dtype, engine_());
      std::memcpy(to + i * bytes, &bits, static_cast<size_t>(bytes));
    }
  }
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(engine_() % static_cast<uint64_t>(bound));
  }

 private:
  static uint64_t hard(DType dtype, uint64_t random) {
    static constexpr uint32_t kFp32[] = {
        0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00001, 0x7f800001, 0xffffffff,
        1,          0x007fffff, 0x807fffff, 0x00800000, 0x7f7fffff, 0x3f808000, 0x3f818000,
        0x477fe000, 0x477ff000, 0x33000000, 0x33000001, 0x387fe000, 0x7f7f8000};
    const uint32_t pick = kFp32[random % std::size(kFp32)];
    if (dtype == DType::kFloat32) return pick;
    if (dtype == DType::kBFloat16) return pick >> 16;
    static constexpr uint16_t kFp16[] = {0, 0x8000, 0x7c00, 0xfc00, 0x7c01, 0xfe00,
                                         1, 0x03ff, 0x83ff, 0x0400, 0x7bff};
    return kFp16[random % std::size(kFp16)];
  }
  std::mt19937_64 engine_;
};

constexpr DType kFloats[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

struct Case {
  DType slice;
  DType output;
  int slices = 1;
  int64_t numel = 0;
  int64_t pad = 0;
  AccumulateOptions options;
  int64_t slice_shift = 0;  // bytes that pointers are moved from an aligned address
  int64_t output_shift = 0;
};

// Runs one case on all levels. Guard bytes around the output must stay.
void check(const Case& c, uint64_t seed) {
  Bits bits(seed);
  const int64_t slice_bytes = dtype_bytes(c.slice);
  const int64_t output_bytes = dtype_bytes(c.output);
  std::vector<std::vector<std::byte>> memory;
  AccumulateBlock block;
  for (int s = 0; s < c.slices; ++s) {
    memory.emplace_back(static_cast<size_t>(c.numel * slice_bytes + c.slice_shift + 1));
    bits.fill(c.slice, memory.back().data() + c.slice_shift, c.numel);
    block.slices.push_back(memory.back().data() + c.slice_shift);
  }
  constexpr int64_t kGuard = 64;
  const int64_t written = (c.numel + c.pad) * output_bytes;
  std::vector<std::byte> before(static_cast<size_t>(written + 2 * kGuard + c.output_shift),
                                std::byte{0xab});
  const int64_t start = kGuard + c.output_shift;
  bits.fill(c.output, before.data() + start, c.numel + c.pad);

  std::vector<std::byte> expected = before;
  for (int64_t i = 0; i < c.numel; ++i) {
    auto slice_value = [&](int s) {
      return read(c.slice, static_cast<const std::byte*>(block.slices[static_cast<size_t>(s)]) +
                               i * slice_bytes);
    };
    float sum = slice_value(0);
    for (int s = 1; s < c.slices; ++s) {
      const float next = slice_value(s);
      if (c.options.op == ReduceOp::kSum) {
        sum += next;
      } else if (std::isnan(next) || (c.options.op == ReduceOp::kMin ? next < sum : next > sum)) {
        sum = next;
      }
    }
    volatile float scaled =
        c.options.op == ReduceOp::kSum ? sum * static_cast<float>(c.options.scale) : sum;
    if (c.options.add_to_output)
      scaled = read(c.output, before.data() + start + i * output_bytes) + scaled;
    write(c.output, expected.data() + start + i * output_bytes, scaled);
  }
  if (!c.options.add_to_output) {
    std::memset(expected.data() + start + c.numel * output_bytes, 0,
                static_cast<size_t>(c.pad * output_bytes));
  }

  for (CpuLevel level : usable_cpu_levels()) {
    std::vector<std::byte> got = before;
    block.output = got.data() + start;
    block.numel = c.numel;
    block.pad_numel = c.pad;
    block.slice_dtype = c.slice;
    block.output_dtype = c.output;
    const Status status = accumulate_block(block, c.options, level);
    ASSERT_TRUE(status.is_ok()) << status.to_string();
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i], expected[i])
          << cpu_level_name(level) << ", " << dtype_name(c.slice) << " to " << dtype_name(c.output)
          << ", " << c.slices << " slices, element "
          << (static_cast<int64_t>(i) - start) / output_bytes << " of " << c.numel << ", seed "
          << seed;
    }
  }
}

TEST(Accumulate, EveryTypePairModeAndSliceCount) {
  uint64_t seed = 1;
  for (DType slice : kFloats) {
    for (DType output : kFloats) {
      for (int slices : {1, 2, 3, 4, 5, 7, 8, 9, 16}) {
        for (bool add : {false, true}) {
          for (double scale : {1.0, 0.25, 1.0 / 3}) {
            Case c{slice, output, slices, 777, 5, {ReduceOp::kSum, scale, add}};
            check(c, ++seed);
          }
        }
        check({slice, output, slices, 333, 3, {ReduceOp::kMin, 1.0, false}}, ++seed);
        check({slice, output, slices, 333, 3, {ReduceOp::kMax, 1.0, false}}, ++seed);
      }
    }
  }
}

TEST(Accumulate, EveryTailAndAlignment) {
  Bits bits(7);
  for (DType slice : kFloats) {
    for (DType output : kFloats) {
      for (int64_t numel = 0; numel <= 140; ++numel) {
        Case c{slice, output, 3, numel, bits.below(4), {ReduceOp::kSum, 0.5, bits.below(2) == 1}};
        c.slice_shift = bits.below(64);
        c.output_shift = bits.below(64);
        check(c, static_cast<uint64_t>(numel));
      }
    }
  }
}

TEST(Accumulate, LargeOutputsThatAreStoredPastTheCache) {
  for (DType slice : kFloats) {
    for (DType output : kFloats) {
      for (int64_t shift : {0, 1, 4, 62}) {
        Case c{slice, output,
               2,     (600 << 10) / dtype_bytes(output) + 13,
               9,     {ReduceOp::kSum, 0.5, false}};
        c.output_shift = shift;
        check(c, static_cast<uint64_t>(shift));
      }
    }
  }
}

// Every bf16 and fp16 value, alone: the sum of one slice with scale 1 is the value itself.
TEST(Accumulate, EverySixteenBitValueSurvivesASumOfOne) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<uint16_t> values(65536);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i);
    for (CpuLevel level : usable_cpu_levels()) {
      std::vector<uint16_t> sums(65536);
      AccumulateBlock block{{values.data()}, sums.data(), 65536, 0, dtype, dtype};
      ASSERT_TRUE(accumulate_block(block, {}, level).is_ok());
      for (size_t i = 0; i < values.size(); ++i) {
        const bool nan = dtype == DType::kBFloat16 ? (i & 0x7fff) > 0x7f80 : (i & 0x7fff) > 0x7c00;
        const int quiet = dtype == DType::kBFloat16 ? 0x7fc0 : 0x7e00;
        ASSERT_EQ(sums[i], nan ? quiet : values[i])
            << dtype_name(dtype) << " " << cpu_level_name(level);
      }
    }
  }
}

template <class T>
void check_exact(DType dtype, ReduceOp op, bool add) {
  std::mt19937_64 engine(static_cast<uint64_t>(dtype));
  constexpr int64_t kNumel = 1234;
  std::vector<std::vector<T>> slices(5, std::vector<T>(kNumel));
  std::vector<T> output(kNumel + 2);
  AccumulateBlock block;
  for (auto& slice : slices) {
    for (T& value : slice) value = static_cast<T>(engine());
    block.slices.push_back(slice.data());
  }
  for (T& value : output) value = static_cast<T>(engine());
  const std::vector<T> before = output;
  block.output = output.data();
  block.numel = kNumel;
  block.pad_numel = 2;
  block.slice_dtype = block.output_dtype = dtype;
  ASSERT_TRUE(accumulate_block(block, {op, 1.0, add}).is_ok());
  for (size_t i = 0; i < kNumel; ++i) {
    T expected = slices[0][i];
    uint64_t sum = 0;  // modulo 2^64, hence modulo every smaller power
    for (const auto& slice : slices) {
      sum += static_cast<uint64_t>(slice[i]);
      if (op == ReduceOp::kMin) expected = std::min(expected, slice[i]);
      if (op == ReduceOp::kMax) expected = std::max(expected, slice[i]);
    }
    if (op == ReduceOp::kSum)
      expected = static_cast<T>(sum + (add ? static_cast<uint64_t>(before[i]) : 0));
    ASSERT_EQ(output[i], expected) << dtype_name(dtype) << " element " << i;
  }
  EXPECT_EQ(output[kNumel], add ? before[kNumel] : T{0});
}

TEST(Accumulate, IntegersAreExactModuloTheirSize) {
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
    for (bool add : {false, true}) {
      if (add && op != ReduceOp::kSum) continue;
      check_exact<uint8_t>(DType::kUInt8, op, add);
      check_exact<int8_t>(DType::kInt8, op, add);
      check_exact<int16_t>(DType::kInt16, op, add);
      check_exact<int32_t>(DType::kInt32, op, add);
      check_exact<int64_t>(DType::kInt64, op, add);
    }
  }
}

TEST(Accumulate, DoublesAreAddedInDouble) {
  const std::vector<double> a = {1.0, 1e300, -0.0, INFINITY};
  const std::vector<double> b = {1e-16, 1e300, -0.0, -INFINITY};
  const std::vector<double> c = {1e-16, -1e300, -0.0, 1.0};
  std::vector<double> output = {1, 1, 0, 1};
  AccumulateBlock block{
      {a.data(), b.data(), c.data()}, output.data(), 4, 0, DType::kFloat64, DType::kFloat64};
  ASSERT_TRUE(accumulate_block(block, {ReduceOp::kSum, 0.1, false}).is_ok());
  EXPECT_EQ(output[0], ((1.0 + 1e-16) + 1e-16) * 0.1);
  EXPECT_EQ(output[1], ((1e300 + 1e300) + -1e300) * 0.1);
  EXPECT_TRUE(output[2] == 0 && std::signbit(output[2]));
  EXPECT_TRUE(std::isnan(output[3]));
}

TEST(Accumulate, SmallContributionsAreNotLostBesideALargeOne) {
  const uint16_t large = 0x4380;  // 256 in bf16; 256 + 1 rounds to 256 there
  const uint16_t one = 0x3f80;
  AccumulateBlock block;
  block.slices.push_back(&large);
  for (int i = 0; i < 64; ++i) block.slices.push_back(&one);
  float sum = 0;
  block.output = &sum;
  block.numel = 1;
  block.slice_dtype = DType::kBFloat16;
  ASSERT_TRUE(accumulate_block(block, {}).is_ok());
  EXPECT_EQ(sum, 320.0f);
}

#if defined(__x86_64__)
TEST(Accumulate, TheCallersFlushToZeroChangesNothing) {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);  // flush-to-zero, denormals-are-zero
  check({DType::kFloat32, DType::kFloat32, 2, 1, 0, {}}, 1);
  std::vector<uint32_t> tiny(100, 3);
  for (CpuLevel level : usable_cpu_levels()) {
    std::vector<uint32_t> sum(100);
    AccumulateBlock block{
        {tiny.data(), tiny.data()}, sum.data(), 100, 0, DType::kFloat32, DType::kFloat32};
    ASSERT_TRUE(accumulate_block(block, {}, level).is_ok());
    EXPECT_THAT(sum, testing::Each(6u));
  }
  EXPECT_EQ(_mm_getcsr() & 0x8040, 0x8040u);  // and stays as it was
  _mm_setcsr(saved);
}
#endif

TEST(Accumulate, WhatCannotBeAddedIsRefused) {
  int64_t word = 5;
  int64_t output = 9;
  AccumulateBlock block{{&word}, &output, 1, 0, DType::kInt64, DType::kFloat32};
  EXPECT_EQ(accumulate_block(block, {}).kind(), ErrorKind::kUnsupported);
  block.output_dtype = DType::kInt64;
  EXPECT_EQ(accumulate_block(block, {ReduceOp::kSum, 0.5, false}).kind(), ErrorKind::kUnsupported);
  EXPECT_EQ(accumulate_block(block, {ReduceOp::kMax, 1.0, true}).kind(), ErrorKind::kUnsupported);
  block.slice_dtype = block.output_dtype = DType::kBool;
  EXPECT_THAT(accumulate_block(block, {}).message(), testing::HasSubstr("bool"));
  EXPECT_EQ(output, 9);
}

}  // namespace
}  // namespace tide
