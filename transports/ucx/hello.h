// How nodes meet: what each puts into the store before it talks, and what the others make of it.
// Pure; the same texts give the same answer on every node.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/base/status.h"

namespace tide {

struct Hello {
  std::string refusal;  // not empty: this node cannot take part, and why; nothing else counts then
  int protocol = 0;     // version of messages and of this text
  std::string transport;  // family asked for: "tcp", "rdma"
  std::string device;
  std::string host;
  int rail = 0;
  int nodes = 0;
  std::string ucx;     // version of the library
  uint64_t epoch = 0;  // node 0's counts
  uint64_t scratch_base = 0;
  std::string scratch_key;
  std::string address;  // of the worker
};

std::string write_hello(const Hello& hello);
Result<Hello> read_hello(const std::string& text);

// OK if these nodes, in node order, can form a group; otherwise the first reason, naming the node.
Status judge_hellos(const std::string& group, const std::vector<Hello>& hellos);

// "ok" with a region's base and key, or a refusal: what a node says in the vote about a region.
std::string write_region(uint64_t base, int64_t bytes, const std::string& key);
std::string write_refusal(const std::string& reason);
struct RegionAnswer {
  std::string refusal;
  uint64_t base = 0;
  int64_t bytes = 0;
  std::string key;
};
Result<RegionAnswer> read_region(const std::string& text);

}  // namespace tide
