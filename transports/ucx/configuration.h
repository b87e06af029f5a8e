// What tide asks of UCX, key by key, and what the user's own UCX_* variables change about it. Pure.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tide {

struct UcxSetting {
  std::string key;  // without UCX_
  std::string value;
  // Kept whatever the environment says: without it a put would be emulated.
  bool required = false;
  unsigned since = 0;  // first version that knows the key
};

struct UcxConfiguration {
  std::vector<UcxSetting> settings;  // to apply, in this order
  std::vector<std::string> notes;    // a sentence for each setting that the environment contradicts
};

// `environment` is getenv: null for what is not set.
UcxConfiguration make_ucx_configuration(const std::string& device, bool rdma, unsigned version,
                                        const std::function<const char*(const char*)>& environment);

// Whether a lane of this transport is what was asked for: tcp for tcp; rc for rdma, ud beside it
// for its wire-up.
bool is_wanted_transport(const std::string& transport, bool rdma);

}  // namespace tide
