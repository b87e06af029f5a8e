// Copies of every shape that decides between the cached and the streamed path, with guard bytes
// around what is written.
#include <gtest/gtest.h>

#include <random>

#include "kernels/copy.h"

namespace tide {
namespace {

struct Shape {
  int64_t rows;
  int64_t row_bytes;
  int64_t to_pitch;
  int64_t from_pitch;
};

void check(const Shape& shape, int64_t to_shift, int64_t from_shift, CpuLevel level) {
  std::mt19937_64 engine(static_cast<uint64_t>(shape.row_bytes + to_shift));
  std::vector<uint8_t> from(
      static_cast<size_t>(shape.rows * shape.from_pitch + shape.row_bytes + from_shift));
  for (uint8_t& byte : from) byte = static_cast<uint8_t>(engine());
  std::vector<uint8_t> to(
      static_cast<size_t>(shape.rows * shape.to_pitch + shape.row_bytes + to_shift + 64), 0xab);
  std::vector<uint8_t> expected = to;
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t i = 0; i < shape.row_bytes; ++i) {
      expected[static_cast<size_t>(to_shift + row * shape.to_pitch + i)] =
          from[static_cast<size_t>(from_shift + row * shape.from_pitch + i)];
    }
  }
  copy_block({to.data() + to_shift, from.data() + from_shift, shape.rows, shape.row_bytes,
              shape.to_pitch, shape.from_pitch},
             level);
  ASSERT_TRUE(to == expected) << cpu_level_name(level) << " rows " << shape.rows << " of "
                              << shape.row_bytes;
}

TEST(Copy, RowsOfAllSizesAndAlignments) {
  for (CpuLevel level : usable_cpu_levels()) {
    for (const Shape& shape :
         {Shape{1, 0, 0, 0}, Shape{0, 100, 100, 100}, Shape{1, 1, 0, 0}, Shape{7, 3, 5, 9},
          Shape{300, 1000, 1000, 1000}, Shape{300, 1024, 1100, 1024}, Shape{300, 1500, 1500, 1531},
          Shape{2, 200'003, 200'003, 300'000}, Shape{1, 400'001, 0, 0},
          Shape{1, kStreamBlockBytes, 0, 0}, Shape{1, kStreamBlockBytes - 1, 0, 0}}) {
      for (int64_t shift : {0, 1, 31, 63}) check(shape, shift, 63 - shift, level);
    }
  }
}

TEST(Copy, MoreThanTwoGigabytesInOneRow) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "a sanitizer's shadow of such memory needs more than a build machine has";
#endif
  constexpr int64_t kBytes = (int64_t{2} << 30) + 4097;
  const auto from = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(kBytes));
  const auto to = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(kBytes));
  for (int64_t i = 0; i < kBytes; i += 4096)
    from[static_cast<size_t>(i)] = static_cast<uint8_t>(i >> 12);
  from[kBytes - 1] = 77;
  copy_block({to.get(), from.get(), 1, kBytes, 0, 0});
  for (int64_t i = 0; i < kBytes - 1; i += 4096)
    ASSERT_EQ(to[static_cast<size_t>(i)], static_cast<uint8_t>(i >> 12));
  EXPECT_EQ(to[kBytes - 1], 77);
}

}  // namespace
}  // namespace tide
