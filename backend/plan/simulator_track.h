// A program as the simulator runs it: one track a queue, steps priced in bytes and pieces, what the
// hardware does in one go merged. Internal to the simulator.
//
// Worked example, a push of two shards to one peer and its signal, as steps and as activities:
//   copy shard 3 -> slot of 1; copy shard 4 -> slot of 1      push 2 x bytes, 2 x pieces to 1
//   signal gather_arrival to 1 = 5                            signal through the engine
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "backend/plan/cost_model.h"
#include "backend/plan/simulator.h"

namespace tide::simulating {

struct Activity {
  enum class Kind : uint8_t { kPush, kKernel, kSignal, kWait, kPut, kTell, kArrive, kDrain };
  Kind kind = Kind::kWait;
  bool engine = false;  // kSignal: behind data
  Counter counter = Counter::kGatherCredit;
  RailEvent event = RailEvent::kArrival;  // kArrive, kTell
  int peer = kSelf;
  uint32_t value = 0;
  int node = -1;
  uint16_t round = 0;
  uint16_t part = 0;
  int ctas = 0;
  int64_t bytes = 0;       // kPush, kPut: moved; kKernel: read and written
  int64_t pieces = 0;      // kPush
  int64_t head_bytes = 0;  // kPut
  double work_s = 0;       // kKernel
};

using Track = std::vector<Activity>;
using Tracks = std::array<Track, kQueueCount>;

// Bytes and runs of piece ranges of one operation's programs; remembers them, as most steps of most
// ranks ask for the same ones.
class PieceCounter {
 public:
  PieceCounter(const GroupLayout& layout, const std::vector<int64_t>& gradient_bytes)
      : layout_(layout), gradient_bytes_(gradient_bytes) {}

  struct Amount {
    int64_t bytes = 0;
    int64_t numel = 0;
    int64_t runs = 0;  // calls of a copy: one a rectangle
  };
  // widened: partial sums, at least 4 bytes an element.
  Amount amount(const Program& program, const Step& step, bool widened);

 private:
  int64_t element_bytes(int parameter, bool widened) const;

  const GroupLayout& layout_;
  const std::vector<int64_t>& gradient_bytes_;
  std::map<std::tuple<int64_t, int, int, int, bool>, Amount> known_;
};

Tracks make_tracks(const Program& program, const FabricModel& fabric, PieceCounter* pieces);

// Bytes of all areas that the program's steps name (staging, landing, partial sums and what
// follows).
int64_t area_bytes(const Program& program);

}  // namespace tide::simulating
