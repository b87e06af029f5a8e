// pytorch 189960 and its kind: offsets kept in 32 bits wrap in large parameters.
//
// Two bf16 parameters on 2 ranks: (32769, 65536) has 2^31 + 65536 elements, (16385, 65536) has just
// more than 2 GiB. Right: places, slots and pieces are exact on both sides of 2^31 elements and of
// 2^31 bytes, and so is what a gather and a reduce move there. The memory is address space: reads
// of what nobody wrote cost nothing, and all but a few pages of what is written alias the same few.
#include <sys/mman.h>
#include <unistd.h>

#include "backend/plan/gather_plan.h"
#include "backend/plan/reduce_plan.h"
#include "tests/ranks/engine_numbers.h"

namespace tide::testing {
namespace {

constexpr int64_t kColumns = 65536;
constexpr int64_t kElement = 2;  // bytes

Parameter matrix(int64_t rows) {
  return {"matrix", DType::kBFloat16, (rows + 1) / 2 * kColumns, rows * kColumns,
          1,        DType::kBFloat16};
}

TEST(Pytorch189960, PlacesPassThirtyTwoBits) {
  const std::vector<Parameter> parameters = {matrix(32769), matrix(16385)};
  ASSERT_EQ(GroupLayout::check(parameters, 2), "");
  const GroupLayout layout(parameters, 2);
  EXPECT_EQ(layout.valid_numel(0, 0), int64_t{16385} * kColumns);
  EXPECT_EQ(layout.valid_numel(0, 1), int64_t{16384} * kColumns);
  EXPECT_EQ(layout.shard_offset(1), int64_t{16385} * kColumns);
  EXPECT_GE(layout.slot_offset(1), int64_t{32769} * kColumns * kElement);
  EXPECT_EQ(layout.slot_offset(1) % kPlaceAlignment, 0);
  Block blocks[3];
  // The last row of the second shard: beyond 2^31 elements.
  const int64_t begin = int64_t{16383} * kColumns;
  ASSERT_EQ(layout.blocks(0, 1, begin, kColumns, blocks), 1);
  EXPECT_EQ(blocks[0].place_begin, int64_t{32768} * kColumns);
  EXPECT_EQ(blocks[0].place_begin, int64_t{1} << 31);
  EXPECT_EQ(blocks[0].shard_begin, begin);
  EXPECT_EQ(blocks[0].rows * blocks[0].row_numel, kColumns);
}

TEST(Pytorch189960, PiecesOfAProgramCoverEveryElementOnce) {
  const GroupLayout layout({matrix(32769)}, 2);
  for (int rank = 0; rank < 2; ++rank) {
    const Program program = plan_gather(layout, rank, {Space::kOutput, true, int64_t{64} << 20});
    int64_t next = 0, most = 0;
    for (const Piece& piece : program.pieces) {
      EXPECT_EQ(piece.begin, next);
      next = piece.begin + piece.numel;
      most = std::max(most, piece.packed_offset + piece.numel * kElement);
    }
    EXPECT_EQ(next, layout.shard_numel());
    EXPECT_LE(most, int64_t{64} << 20);
  }
}

// Address space for `numel` bf16 elements. Written pages alias a few, but for those around the
// elements `exact`.
class Sparse {
 public:
  static constexpr int64_t kPeriod = 16 << 20;

  Sparse(int64_t numel, const std::vector<int64_t>& exact)
      : bytes_((numel * kElement / kPeriod + 1) * kPeriod) {
    const auto periods = static_cast<int>(exact.size()) + 1;
    const int file = memfd_create("sparse", 0);
    EXPECT_EQ(ftruncate(file, periods * kPeriod), 0);
    base_ = static_cast<char*>(mmap(nullptr, static_cast<size_t>(bytes_), PROT_NONE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (int64_t at = 0; at < bytes_; at += kPeriod) {
      int period = 0;  // the shared one
      for (int own = 1; own < periods; ++own) {
        if (exact[static_cast<size_t>(own - 1)] * kElement / kPeriod == at / kPeriod) period = own;
      }
      mmap(base_ + at, kPeriod, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
           period * kPeriod);
    }
    ::close(file);
  }
  ~Sparse() { munmap(base_, static_cast<size_t>(bytes_)); }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;

  uint16_t* get() const { return reinterpret_cast<uint16_t*>(base_); }

 private:
  int64_t bytes_;
  char* base_;
};

// Elements of the whole parameter on both sides of what could wrap, and at the end.
std::vector<int64_t> places_of_interest(int64_t rows) {
  std::vector<int64_t> places;
  const int64_t limits[] = {int64_t{1} << 30, int64_t{1} << 31, (rows + 1) / 2 * kColumns,
                            rows * kColumns};
  for (int64_t limit : limits) {
    for (int64_t place : {limit - 1, limit}) {
      if (place < rows * kColumns) places.push_back(place);
    }
  }
  return places;
}

uint16_t number(int64_t place) { return bf16_of(static_cast<float>(place % 251 + 1)); }

class Pytorch189960Rows : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "the thread sanitizer keeps twice the address space as memory";
#endif
  }
};

TEST_P(Pytorch189960Rows, AGatherBringsTheRowsAtTheBoundary) {
  const int64_t rows = GetParam();
  WorldOptions options;
  options.group.landing_slice_bytes = 16 << 20;
  run_ranks(2, options, [rows](int rank, Group& group) {
    auto layout = std::make_shared<GroupLayout>(std::vector<Parameter>{matrix(rows)}, 2);
    const int64_t shard = layout->shard_numel();
    const std::vector<int64_t> places = places_of_interest(rows);
    std::vector<int64_t> own;
    for (int64_t place : places) {
      if (place / shard == rank) own.push_back(place - rank * shard);
    }
    const Sparse input(shard, own);
    const Sparse output(2 * shard, places);
    for (int64_t element : own) input.get()[element] = number(rank * shard + element);
    auto operation = group.gather_list(layout, {input.get()}, {output.get()});
    TIDE_ASSERT_OK(operation.status());
    TIDE_ASSERT_OK(operation.value()->wait());
    for (int64_t place : places)
      EXPECT_EQ(output.get()[place], number(place)) << "element " << place;
  });
}

TEST_P(Pytorch189960Rows, AReduceSumsTheRowsAtTheBoundary) {
  const int64_t rows = GetParam();
  WorldOptions options;
  options.group.staging_slice_bytes = 16 << 20;
  run_ranks(2, options, [rows](int rank, Group& group) {
    auto layout = std::make_shared<GroupLayout>(std::vector<Parameter>{matrix(rows)}, 2);
    const int64_t shard = layout->shard_numel();
    const std::vector<int64_t> places = places_of_interest(rows);
    std::vector<int64_t> own;
    for (int64_t place : places) {
      if (place / shard == rank) own.push_back(place - rank * shard);
    }
    const Sparse input(2 * shard, places);
    const Sparse output(shard, own);
    for (int64_t place : places) input.get()[place] = number(place);
    auto operation = group.reduce_list(layout, {input.get()}, {output.get()}, DType::kBFloat16, {});
    TIDE_ASSERT_OK(operation.status());
    TIDE_ASSERT_OK(operation.value()->wait());
    for (int64_t element : own) {
      const float wanted =
          2 * float_of_bf16(number(rank * shard + element));  // 502 at most: even, exact
      EXPECT_EQ(float_of_bf16(output.get()[element]), wanted)
          << "element " << rank * shard + element;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Rows, Pytorch189960Rows, ::testing::Values(16385, 32769));

}  // namespace
}  // namespace tide::testing
