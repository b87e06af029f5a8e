#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "backend/layout/group_layout.h"

namespace tide {
namespace {

Parameter rows_parameter(const std::string& name, int64_t unsharded_numel, int ranks,
                         DType dtype = DType::kBFloat16) {
  Parameter parameter;
  parameter.name = name;
  parameter.dtype = parameter.shard_dtype = dtype;
  parameter.unsharded_numel = unsharded_numel;
  parameter.shard_numel = (unsharded_numel + ranks - 1) / ranks;
  return parameter;
}

Parameter column_parameter(const std::string& name, int64_t rows, int64_t row_numel, int ranks) {
  Parameter parameter;
  parameter.name = name;
  parameter.dtype = parameter.shard_dtype = DType::kFloat32;
  parameter.rows = rows;
  parameter.shard_numel = rows * row_numel;
  parameter.unsharded_numel = parameter.shard_numel * ranks;
  return parameter;
}

// The place of element i of rank's shard, by the definition in the header.
int64_t place_of(const Parameter& parameter, int ranks, int rank, int64_t i) {
  const int64_t row_numel = parameter.shard_numel / parameter.rows;
  return i / row_numel * ranks * row_numel + rank * row_numel + i % row_numel;
}

// Expands blocks element by element and compares with place_of().
void expect_blocks(const GroupLayout& layout, int p, int rank, int64_t begin, int64_t numel) {
  Block blocks[3];
  const int count = layout.blocks(p, rank, begin, numel, blocks);
  ASSERT_LE(count, 3);
  int64_t next = begin;
  for (int b = 0; b < count; ++b) {
    ASSERT_GE(blocks[b].rows, 1);
    ASSERT_GE(blocks[b].row_numel, 1);
    for (int64_t row = 0; row < blocks[b].rows; ++row) {
      for (int64_t column = 0; column < blocks[b].row_numel; ++column, ++next) {
        ASSERT_EQ(blocks[b].shard_begin + row * blocks[b].shard_pitch + column, next);
        ASSERT_EQ(blocks[b].place_begin + row * blocks[b].place_pitch + column,
                  place_of(layout.parameter(p), layout.ranks(), rank, next));
      }
    }
  }
  EXPECT_EQ(next, begin + numel);
}

TEST(GroupLayoutTest, PaperExample) {
  constexpr int64_t kMega = 1 << 20;
  std::vector<Parameter> parameters;
  for (int64_t mega : {2, 1, 3}) {
    parameters.push_back(rows_parameter("p" + std::to_string(parameters.size()), mega * kMega * 4,
                                        4, DType::kUInt8));
  }
  ASSERT_EQ(GroupLayout::check(parameters, 4), "");
  const GroupLayout layout(parameters, 4);
  EXPECT_EQ(layout.shard_numel(), 6 * kMega);
  // In an output ordered by rank, rank 1's piece of the second parameter lies at 8 MB; in the slot
  // at 9 MB.
  EXPECT_EQ(1 * layout.shard_numel() + layout.shard_offset(1), 8 * kMega);
  Block blocks[3];
  ASSERT_EQ(layout.blocks(1, 1, 0, kMega, blocks), 1);
  EXPECT_EQ(layout.slot_offset(1) + blocks[0].place_begin, 9 * kMega);
  EXPECT_EQ(layout.slot_bytes(), 24 * kMega);
  EXPECT_EQ(layout.shard_bytes(), 6 * kMega);
}

TEST(GroupLayoutTest, PlacesOfDimensionOne) {
  // 3 rows of 2 columns a rank on 4 ranks: rank 2's row 1 starts at 1 * 8 + 2 * 2.
  const GroupLayout layout({column_parameter("w", 3, 2, 4)}, 4);
  Block blocks[3];
  ASSERT_EQ(layout.blocks(0, 2, 0, 6, blocks), 1);
  EXPECT_EQ(blocks[0].rows, 3);
  EXPECT_EQ(blocks[0].row_numel, 2);
  EXPECT_EQ(blocks[0].place_begin, 4);
  EXPECT_EQ(blocks[0].place_pitch, 8);
  EXPECT_EQ(blocks[0].shard_pitch, 2);
  ASSERT_EQ(layout.blocks(0, 2, 2, 2, blocks), 1);
  EXPECT_EQ(blocks[0].place_begin, 12);
}

TEST(GroupLayoutTest, PartialRowBlocks) {
  for (int ranks : {1, 2, 3, 5}) {
    for (int64_t rows : {1, 2, 4, 7}) {
      for (int64_t row_numel : {1, 3, 8}) {
        const GroupLayout layout({column_parameter("w", rows, row_numel, ranks)}, ranks);
        for (int64_t begin = 0; begin <= rows * row_numel; ++begin) {
          for (int64_t numel = 0; begin + numel <= rows * row_numel; ++numel) {
            expect_blocks(layout, 0, ranks - 1, begin, numel);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(GroupLayoutTest, EveryElementHasExactlyOnePlace) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const GroupLayout layout(
        {rows_parameter("odd", 4 * ranks - 1, ranks), column_parameter("w", 3, 2, ranks)}, ranks);
    for (int p = 0; p < layout.size(); ++p) {
      std::vector<int> times(static_cast<size_t>(layout.parameter(p).unsharded_numel), 0);
      for (int rank = 0; rank < ranks; ++rank) {
        Block blocks[3];
        const int count = layout.blocks(p, rank, 0, layout.valid_numel(p, rank), blocks);
        for (int b = 0; b < count; ++b) {
          for (int64_t row = 0; row < blocks[b].rows; ++row) {
            for (int64_t column = 0; column < blocks[b].row_numel; ++column) {
              ++times.at(static_cast<size_t>(blocks[b].place_begin + row * blocks[b].place_pitch +
                                             column));
            }
          }
        }
      }
      for (int count : times) EXPECT_EQ(count, 1);
    }
  }
}

TEST(GroupLayoutTest, FewerElementsThanRanks) {
  const GroupLayout layout({rows_parameter("three", 3, 8)}, 8);
  EXPECT_EQ(layout.parameter(0).shard_numel, 1);
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(layout.valid_numel(0, rank), rank < 3 ? 1 : 0);
}

TEST(GroupLayoutTest, Padding) {
  // 10 elements on 4 ranks: shards of 3, the last holds 1.
  const GroupLayout layout({rows_parameter("ten", 10, 4)}, 4);
  EXPECT_EQ(layout.valid_numel(0, 2), 3);
  EXPECT_EQ(layout.valid_numel(0, 3), 1);
  EXPECT_EQ(layout.slot_bytes(), kPlaceAlignment);
  EXPECT_EQ(layout.shard_bytes(), 3 * 2);
}

TEST(GroupLayoutTest, EmptyTensorsTakeNoRoom) {
  const GroupLayout layout(
      {rows_parameter("a", 5, 2), rows_parameter("empty", 0, 2), rows_parameter("b", 6, 2)}, 2);
  EXPECT_EQ(layout.shard_offset(1), 3);
  EXPECT_EQ(layout.shard_offset(2), 3);
  EXPECT_EQ(layout.slot_offset(2), layout.slot_offset(1));
  Block blocks[3];
  EXPECT_EQ(layout.blocks(1, 1, 0, 0, blocks), 0);
  EXPECT_EQ(layout.valid_numel(1, 1), 0);
}

TEST(GroupLayoutTest, NoParameters) {
  EXPECT_EQ(GroupLayout::check({}, 3), "");
  const GroupLayout layout({}, 3);
  EXPECT_EQ(layout.size(), 0);
  EXPECT_EQ(layout.shard_numel(), 0);
  EXPECT_EQ(layout.slot_bytes(), 0);
}

TEST(GroupLayoutTest, SlotOffsetsAreAligned) {
  std::mt19937 random(7);
  std::vector<Parameter> parameters;
  for (int p = 0; p < 1000; ++p) {
    parameters.push_back(
        rows_parameter("p" + std::to_string(p), static_cast<int64_t>(random() % 5000), 8));
  }
  ASSERT_EQ(GroupLayout::check(parameters, 8), "");
  const GroupLayout layout(parameters, 8);
  int64_t shard_numel = 0;
  for (int p = 0; p < 1000; ++p) {
    EXPECT_EQ(layout.slot_offset(p) % kPlaceAlignment, 0);
    const int64_t next = p == 999 ? layout.slot_bytes() : layout.slot_offset(p + 1);
    EXPECT_GE(next - layout.slot_offset(p), 8 * layout.parameter(p).shard_numel * 2);
    EXPECT_LT(next - layout.slot_offset(p),
              8 * layout.parameter(p).shard_numel * 2 + kPlaceAlignment);
    EXPECT_EQ(layout.shard_offset(p), shard_numel);
    shard_numel += layout.parameter(p).shard_numel;
  }
  EXPECT_EQ(layout.shard_numel(), shard_numel);
}

TEST(GroupLayoutTest, SizesBeyond32Bits) {
  constexpr int64_t kShard = int64_t{3} << 32;
  const GroupLayout layout(
      {rows_parameter("big", kShard * 8, 8), column_parameter("wide", 4, int64_t{1} << 33, 8)}, 8);
  Block blocks[3];
  ASSERT_EQ(layout.blocks(0, 7, kShard - 1, 1, blocks), 1);
  EXPECT_EQ(blocks[0].place_begin, 8 * kShard - 1);
  EXPECT_EQ(layout.slot_offset(1), 8 * kShard * 2);
  ASSERT_EQ(layout.blocks(1, 7, (int64_t{1} << 33) + 1, (int64_t{1} << 34), blocks), 3);
  EXPECT_EQ(blocks[0].place_begin, (int64_t{1} << 36) + 7 * (int64_t{1} << 33) + 1);
  EXPECT_EQ(blocks[2].row_numel, 1);
}

TEST(GroupLayoutTest, HashCoversWhatMustBeEqual) {
  const std::vector<Parameter> parameters = {rows_parameter("a", 10, 4),
                                             column_parameter("b", 2, 3, 4)};
  const uint64_t hash = GroupLayout(parameters, 4).hash();
  const auto changed = [&](auto change) {
    std::vector<Parameter> other = parameters;
    change(other);
    return GroupLayout(other, 4).hash();
  };
  EXPECT_EQ(changed([](auto& other) { other[0].name = "renamed"; }), hash);
  EXPECT_NE(changed([](auto& other) { other[0].unsharded_numel = 11; }), hash);
  EXPECT_NE(changed([](auto& other) { other[0].shard_numel = 4; }), hash);
  EXPECT_NE(changed([](auto& other) { other[0].dtype = DType::kFloat16; }), hash);
  EXPECT_NE(changed([](auto& other) { other[0].shard_dtype = DType::kFloat32; }), hash);
  EXPECT_NE(changed([](auto& other) { other[1].rows = 3; }), hash);
  EXPECT_NE(changed([](auto& other) { std::swap(other[0], other[1]); }), hash);
  EXPECT_NE(changed([](auto& other) { other.pop_back(); }), hash);
  EXPECT_NE(GroupLayout({rows_parameter("a", 8, 4)}, 4).hash(),
            GroupLayout({rows_parameter("a", 8, 4)}, 5).hash());
}

TEST(GroupLayoutTest, CheckNamesTheParameterWantedAndGot) {
  const auto refusal = [](auto change) {
    std::vector<Parameter> parameters = {rows_parameter("good", 8, 4),
                                         column_parameter("bad", 2, 3, 4)};
    change(parameters[1]);
    return GroupLayout::check(parameters, 4);
  };
  const auto mentions = [](const std::string& text, const std::string& word) {
    return text.find(word) != std::string::npos;
  };
  EXPECT_EQ(refusal([](Parameter&) {}), "");
  std::string text = refusal([](Parameter& bad) { bad.rows = 4; });
  EXPECT_TRUE(mentions(text, "'bad'") && mentions(text, "4 rows") && mentions(text, "6 elements"))
      << text;
  text = refusal([](Parameter& bad) { bad.unsharded_numel = 25; });
  EXPECT_TRUE(mentions(text, "'bad'") && mentions(text, "24") && mentions(text, "25")) << text;
  text = refusal([](Parameter& bad) { bad.unsharded_numel = 23; });
  EXPECT_TRUE(mentions(text, "padded") && mentions(text, "24") && mentions(text, "23")) << text;
  EXPECT_TRUE(mentions(refusal([](Parameter& bad) { bad.shard_numel = -2; }), "-2"));
  EXPECT_TRUE(mentions(refusal([](Parameter& bad) { bad.unsharded_numel = -1; }), "-1"));
  EXPECT_TRUE(mentions(refusal([](Parameter& bad) { bad.rows = 0; }), "rows must be >= 1"));
  EXPECT_TRUE(mentions(GroupLayout::check({}, 0), "ranks"));
}

TEST(GroupLayoutTest, CheckRefusesOverflow) {
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  Parameter parameter;
  parameter.name = "huge";
  parameter.dtype = parameter.shard_dtype = DType::kUInt8;
  parameter.shard_numel = kLargest / 2;
  EXPECT_NE(GroupLayout::check({parameter}, 3), "");
  EXPECT_NE(GroupLayout::check({parameter, parameter, parameter}, 1), "");
  parameter.shard_numel = kLargest;
  EXPECT_NE(GroupLayout::check({parameter}, 1), "") << "no room to align";
  parameter.shard_numel = kLargest / 8;
  parameter.dtype = DType::kFloat64;
  EXPECT_NE(GroupLayout::check({parameter}, 2), "");
  parameter.shard_numel = kLargest / 16 - kPlaceAlignment;
  EXPECT_EQ(GroupLayout::check({parameter}, 1), "");
}

}  // namespace
}  // namespace tide
