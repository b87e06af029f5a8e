// A window of processes: every rank's part is an unnamed memory file (memfd) of sealed size, all
// parts mapped side by side. Nothing has a name, so nothing is left behind, however the processes
// end.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/base/status.h"
#include "transports/fabric.h"
#include "transports/host/descriptor.h"
#include "transports/host/window_map.h"

namespace tide {

// This rank's part: zeroed, all its pages allocated now (a machine without room says so here, and
// no later access can fail), its size sealed so that nobody can cut it under the others' feet.
// kSystem with the reason otherwise: there must be room for the parts of all `ranks`, which make
// theirs at the same time.
Result<Descriptor> make_window_part(int64_t bytes, int ranks);

// Whether a part that a peer sent is what make_window_part makes.
Status check_window_part(const Descriptor& part, int64_t bytes);

// Mapped from creation to destruction; the descriptors are not needed afterwards. A forked child
// has no access: the mapping is absent there, and the destructor then leaves the child's address
// space alone.
class HostWindow : public Window {
 public:
  // parts[r] is rank r's.
  static Result<std::shared_ptr<HostWindow>> map(const std::vector<const Descriptor*>& parts,
                                                 int rank, int64_t bytes,
                                                 std::shared_ptr<WindowMap> map);
  ~HostWindow() override;
  HostWindow(const HostWindow&) = delete;
  HostWindow& operator=(const HostWindow&) = delete;

  int64_t bytes() const override { return bytes_; }
  void* own() const override { return peer(rank_); }
  void* peer(int rank) const override { return base_ + rank * stride_; }

 private:
  HostWindow(char* base, int64_t stride, int ranks, int rank, int64_t bytes,
             std::shared_ptr<WindowMap> map);

  char* const base_;
  const int64_t stride_;
  const int ranks_;
  const int rank_;
  const int64_t bytes_;
  const pid_t owner_;
  std::shared_ptr<WindowMap> map_;
};

}  // namespace tide
