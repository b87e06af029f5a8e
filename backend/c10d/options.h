// What a user may set for one process group: tide.Options in Python. Every field left empty is
// filled from its TIDE_ knob (python/tide/knobs.py) before a backend sees it, so C++ code reads
// final values only.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace tide {

struct OptionsTide : c10d::Backend::Options {
  explicit OptionsTide(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options("tide", timeout) {}

#if TIDE_TORCH_MINOR >= 14
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<OptionsTide>(*this);
  }
#endif

  std::string inner_cpu;           // c10d backend that serves CPU tensors where tide does not
  std::string inner_cuda;          // the same for CUDA tensors
  int64_t node_size = -1;          // cut one host's ranks into nodes of this many; 0: one node
  std::string memory_mode;         // "in_place" or "slot_reuse"
  std::string fsdp;                // "both", "gather", "reduce" or "0"
  std::string multicast;           // "auto", or "0": this rank does not want it
  int64_t own_collectives = -1;    // 0: hand the layout collectives to the inner backend too
  int64_t arena_limit_bytes = -1;  // of this process, all groups together; 0: none
  int64_t staging_slice_bytes = -1;
  int64_t landing_slice_bytes = -1;
  int64_t flight_record_size = -1;
  // Between nodes.
  std::string rails;                        // devices by local rank; "": found
  std::string ucx_library;                  // file; "": found
  std::vector<std::string> ucx_candidates;  // files tried where the system has no UCX
  std::string schedule;                     // "doubling", "ring" or "direct"
  std::string pacing;                       // "confirm", "confirm_whole", "grant" or "off"
  int64_t head_bytes = -1;                  // of one round
};

}  // namespace tide
