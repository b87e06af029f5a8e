#include "backend/plan/simulator_track.h"

#include <algorithm>
#include <set>

namespace tide::simulating {
namespace {

// Signals that follow a queue's copies go where the copies go; all others pass them by.
bool is_behind_data(const Track& track, int peer) {
  if (peer == kSelf) return false;
  size_t last = track.size();
  while (last > 0 && track[last - 1].kind == Activity::Kind::kSignal) --last;
  return last > 0 && track[last - 1].kind == Activity::Kind::kPush;
}

class TrackMaker {
 public:
  TrackMaker(const Program& program, const FabricModel& fabric, PieceCounter* pieces)
      : program_(program), fabric_(fabric), pieces_(pieces) {}

  Tracks make() {
    for (const Step& step : program_.steps) append(step);
    for (Track& track : tracks_) track.shrink_to_fit();
    return std::move(tracks_);
  }

 private:
  Track& track(const Step& step) { return tracks_[static_cast<size_t>(step.queue)]; }

  Activity& add(const Step& step, Activity::Kind kind) {
    Activity& activity = track(step).emplace_back();
    activity.kind = kind;
    activity.peer = step.peer;
    activity.counter = step.counter;
    activity.value = step.value;
    activity.node = step.node;
    activity.round = step.round;
    activity.part = step.part;
    return activity;
  }

  void append(const Step& step) {
    switch (step.op) {
      case Op::kCopy:
        return copy(step);
      case Op::kCast:
        return cast(step);
      case Op::kAccumulate:
        return accumulate(step);
      case Op::kCombine:
        return combine(step);
      case Op::kReadAdd:
        return read_add(step);
      case Op::kZero:
        return zero(step);
      case Op::kSignal: {
        const bool behind = is_behind_data(track(step), step.peer);
        add(step, Activity::Kind::kSignal).engine = behind;
        return;
      }
      case Op::kWait:
        add(step, Activity::Kind::kWait);
        return;
      case Op::kPut: {
        Activity& put = add(step, Activity::Kind::kPut);
        put.bytes = step.bytes;
        put.head_bytes = step.head_bytes;
        return;
      }
      case Op::kConfirm:
      case Op::kGrant:
        add(step, Activity::Kind::kTell).event =
            step.op == Op::kGrant ? RailEvent::kGrant : RailEvent::kConfirm;
        return;
      case Op::kArrive:
        add(step, Activity::Kind::kArrive).event = step.event;
        return;
      case Op::kDrain:
        add(step, Activity::Kind::kDrain);
        return;
    }
  }

  void copy(const Step& step) {
    const PieceCounter::Amount amount = pieces_->amount(program_, step, step.from == Space::kSeat);
    if (step.peer == kSelf) {
      kernel(step, 2 * amount.bytes, fabric_.kernel_ctas,
             copy_s(fabric_, amount.bytes, fabric_.kernel_ctas));
      return;
    }
    Track& queue = track(step);
    const bool joins = !queue.empty() && queue.back().kind == Activity::Kind::kPush &&
                       queue.back().peer == (step.peer == kAllRanks ? kAllPeers : step.peer);
    Activity& push = joins ? queue.back() : add(step, Activity::Kind::kPush);
    if (step.peer == kAllRanks) push.peer = kAllPeers;
    push.bytes += amount.bytes;
    push.pieces += amount.runs;
  }

  void cast(const Step& step) {
    const PieceCounter::Amount amount = pieces_->amount(program_, step, false);
    const int64_t bytes = amount.bytes + 4 * amount.numel;  // fp32 read, dtype written
    kernel(step, bytes, fabric_.kernel_ctas, copy_s(fabric_, bytes / 2, fabric_.kernel_ctas));
  }

  // Into one rank's fp32: every slice is read, the sum is written.
  void accumulate(const Step& step) {
    const PieceCounter::Amount amount = pieces_->amount(program_, step, false);
    const int64_t bytes = program_.locals() * amount.bytes + 4 * amount.numel;
    kernel(step, bytes, fabric_.kernel_ctas, sum_s(fabric_, bytes, fabric_.kernel_ctas));
  }

  void combine(const Step& step) {
    const PieceCounter::Amount amount = pieces_->amount(program_, step, true);
    const int64_t read = step.shards + (step.first_number > 0 ? 1 : 0);
    const int64_t bytes = (read + 1) * amount.bytes;
    kernel(step, bytes, fabric_.combine_ctas, sum_s(fabric_, bytes, fabric_.combine_ctas));
  }

  // The switch reads the seats of all ranks and hands over their sum.
  void read_add(const Step& step) {
    const PieceCounter::Amount amount = pieces_->amount(program_, step, true);
    const int64_t local = (step.first_number > 0 ? 2 : 1) * amount.bytes;
    kernel(step, amount.bytes + local, fabric_.combine_ctas,
           static_cast<double>(amount.bytes) /
                   std::min(fabric_.combine_ctas * fabric_.pull_rate_per_cta, fabric_.push_rate) +
               sum_s(fabric_, local, fabric_.combine_ctas));
  }

  void zero(const Step& step) {
    const int64_t bytes = step.shards * program_.partial_bytes;
    kernel(step, bytes, fabric_.kernel_ctas, copy_s(fabric_, bytes / 2, fabric_.kernel_ctas));
  }

  // Kernels of one queue in a row are one launch.
  void kernel(const Step& step, int64_t bytes, int ctas, double work_s) {
    Track& queue = track(step);
    const bool joins =
        !queue.empty() && queue.back().kind == Activity::Kind::kKernel && queue.back().ctas == ctas;
    Activity& activity = joins ? queue.back() : add(step, Activity::Kind::kKernel);
    activity.ctas = ctas;
    activity.bytes += bytes;
    activity.work_s += work_s;
  }

  const Program& program_;
  const FabricModel& fabric_;
  PieceCounter* pieces_;
  Tracks tracks_;
};

// The gather's pushes come in turns, one peer after the other with the same pieces, a signal behind
// each. By multicast a turn is: its waits, one push to all, one signal to all.
Track with_multicast(const Track& track, int peers) {
  Track result;
  Track waits;
  Activity push;
  int signals = 0;
  for (const Activity& activity : track) {
    if (activity.kind == Activity::Kind::kWait) {
      waits.push_back(activity);
    } else if (activity.kind == Activity::Kind::kPush) {
      push = activity;
    } else if (activity.peer == kAllPeers) {
      result.push_back(activity);
    } else if (++signals == peers) {
      result.insert(result.end(), waits.begin(), waits.end());
      push.peer = kAllPeers;
      result.push_back(push);
      result.push_back(activity);
      result.back().peer = kAllPeers;
      waits.clear();
      signals = 0;
    }
  }
  result.insert(result.end(), waits.begin(), waits.end());
  return result;
}

}  // namespace

int64_t PieceCounter::element_bytes(int parameter, bool widened) const {
  const int64_t bytes = gradient_bytes_.empty() ? dtype_bytes(layout_.parameter(parameter).dtype)
                                                : gradient_bytes_[parameter];
  return widened ? std::max<int64_t>(4, bytes) : bytes;
}

PieceCounter::Amount PieceCounter::amount(const Program& program, const Step& step, bool widened) {
  // Programs of one operation have the same piece table.
  const auto key = std::make_tuple(static_cast<int64_t>(step.shard), step.first_piece,
                                   step.last_piece, static_cast<int>(step.from), widened);
  const auto known = known_.find(key);
  if (known != known_.end()) return known->second;
  Amount amount;
  Block blocks[3];
  for (int i = step.first_piece; i < step.last_piece; ++i) {
    const Piece& piece = program.pieces[i];
    const int count = piece_blocks(layout_, piece, step.shard, blocks);
    for (int b = 0; b < count; ++b) {
      const int64_t numel = blocks[b].rows * blocks[b].row_numel;
      amount.numel += numel;
      amount.bytes += numel * element_bytes(piece.parameter, widened);
      ++amount.runs;
    }
  }
  known_.emplace(key, amount);
  return amount;
}

int64_t area_bytes(const Program& program) {
  std::set<Space> named;
  for (const Step& step : program.steps) {
    if (step.op == Op::kSignal || step.op == Op::kWait || step.op == Op::kArrive) continue;
    named.insert(step.from);
    named.insert(step.to);
  }
  int64_t bytes = 0;
  for (Space space : named) {
    if (space == Space::kStaging || space == Space::kLanding) {
      bytes += program.areas * program.slices(space) * program.slice_bytes;
    } else if (space == Space::kPartial || space == Space::kSeat || space == Space::kBlock) {
      bytes += program.areas * program.slices(space) * program.partial_bytes;
    } else if (space == Space::kTotal) {
      bytes += program.slices(space) * program.partial_bytes;
    }
  }
  return bytes;
}

Tracks make_tracks(const Program& program, const FabricModel& fabric, PieceCounter* pieces) {
  Tracks tracks = TrackMaker(program, fabric, pieces).make();
  Track& pushes = tracks[static_cast<size_t>(Queue::kGatherPush)];
  const bool is_to_all = std::any_of(program.steps.begin(), program.steps.end(),
                                     [](const Step& step) { return step.peer == kAllRanks; });
  if (fabric.multicast && program.locals() > 2 && !is_to_all) {
    pushes = with_multicast(pushes, program.locals() - 1);
  }
  return tracks;
}

}  // namespace tide::simulating
