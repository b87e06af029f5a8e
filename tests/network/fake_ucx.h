// A table of UCX functions that behaves like an RDMA device at its worst: a put is complete for its
// sender before any byte has landed, puts land late and in any order, only a flush says that those
// before it have landed, and messages overtake everything. One fake a process; not for two tests at
// a time.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transports/ucx/ucx_api.h"

namespace tide {

struct FakeUcxBehaviour {
  unsigned minor = 22;
  std::set<std::string> unknown_keys;
  ucs_status_t start = UCS_OK;  // what init answers
  std::vector<std::pair<std::string, std::string>> lanes = {{"rc_mlx5", "mlx5_0:1"},
                                                            {"ud_mlx5", "mlx5_0:1"}};
  bool knows_cuda = false;
  bool takes_cuda_for_host = false;
  ucs_status_t map = UCS_OK;   // what mem_map answers
  ucs_status_t put = UCS_OK;   // what put answers at once
  bool corrupts = false;       // the last byte of each put lands wrong
  bool requests_hang = false;  // nothing that is under way ends
  uint64_t seed = 1;
};

// Starts over with this behaviour. The table stays valid.
const UcxApi* fake_ucx(const FakeUcxBehaviour& behaviour = {});
void fake_ucx_change(const std::function<void(FakeUcxBehaviour&)>& change);  // while it runs
std::map<std::string, std::string> fake_ucx_settings();  // as config_modify got them
// Every endpoint to and from the worker that sits `index`-th in order of creation breaks with this
// status.
void fake_ucx_break(int worker_index, ucs_status_t status);
int fake_ucx_live_objects();  // contexts, workers, endpoints, keys, registrations, requests
// As a stranger would: an active message to every worker.
void fake_ucx_inject(const std::string& header, const std::string& data);

}  // namespace tide
