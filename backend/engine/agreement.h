// Whether ranks are in the same call: compares call records, and says in one sentence what differs.
//
// Compared when a call's first signal of a peer arrives (before anything is pushed to it), and
// about every 100 ms in every wait, so that a rank that skipped a call or made another one is named
// instead of waited for. Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "backend/base/status.h"
#include "backend/engine/control_page.h"
#include "backend/layout/group_layout.h"

namespace tide {

class Agreement {
 public:
  Agreement(std::shared_ptr<ControlPage> control, std::string group)
      : control_(std::move(control)), group_(std::move(group)) {}

  // Names of plans, for messages.
  void add_plan(int plan, std::string name);
  void remove_plan(int plan);

  struct Answer {
    Status status;  // OK: equal, or the peer has not come to this call yet
    // Not OK, and the peer's table, not there yet, would say which tensor differs.
    bool needs_table = false;
  };
  // `arrived`: a signal of this call came from `rank`, so its record must be there. `layout`: of
  // the own call, for the parameters' names; may be null.
  Answer compare(const CallRecord& own, int rank, bool arrived, const GroupLayout* layout) const;
  int rank() const { return control_->rank(); }
  int ranks() const { return control_->ranks(); }

  // A peer that has refused a call over wrong arguments instead of making this one, for two seconds
  // of the wait for it that began at `since`. A caller may catch the error and come with a better
  // call: hence the patience. Ranks that all refuse a call count it alike.
  Status refused_instead(const CallRecord& own, int rank, Clock::time_point since) const;

  // "gather of 'layers.3'", "gather_list of 9 tensors (1024 bytes a rank)".
  std::string describe(const CallRecord& record) const;

 private:
  std::string difference(const CallRecord& own, const CallRecord& other, int rank,
                         const GroupLayout* layout, bool* needs_table) const;
  std::string tensor_difference(const CallRecord& own, int rank, const GroupLayout* layout,
                                bool* needs_table) const;

  const std::shared_ptr<ControlPage> control_;
  const std::string group_;
  mutable std::mutex mutex_;
  std::map<int, std::string> plans_;
};

// What a wait asks while it is not over: whether all peers are in the same call, as far as they can
// say, and none has refused instead of making it. One object per call that waits.
class PeerWatch {
 public:
  // OK to go on. A difference in tensors waits a second for the peer's table, which names the
  // tensor.
  Status check(const Agreement& agreement, const CallRecord& own, const GroupLayout* layout);

 private:
  Clock::time_point since_ = Clock::now();
  Clock::time_point needs_table_since_{};
};

// What CallRecord::options holds.
uint64_t pack_options(int reduce_op, DType output_dtype, bool add_to_output, bool slot_reuse);

}  // namespace tide
