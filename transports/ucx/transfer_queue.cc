#include "transports/ucx/transfer_queue.h"

#include <algorithm>

namespace tide {
namespace {

Chunk cut(const std::shared_ptr<Transfer>& transfer, int64_t most) {
  Transfer& state = *transfer;
  while (state.put.segments[state.segment].bytes == state.segment_offset) {  // empty segments, too
    ++state.segment;
    state.segment_offset = 0;
  }
  const Segment& segment = state.put.segments[state.segment];
  int64_t bytes = std::min(segment.bytes - state.segment_offset, most);
  const int64_t head = std::min(state.put.head_bytes, state.total_bytes);
  if (state.posted_bytes < head) bytes = std::min(bytes, head - state.posted_bytes);
  Chunk chunk;
  chunk.transfer = transfer;
  chunk.from = static_cast<const char*>(segment.from) + state.segment_offset;
  chunk.to_offset = segment.to_offset + state.segment_offset;
  chunk.bytes = bytes;
  state.segment_offset += bytes;
  state.posted_bytes += bytes;
  chunk.ends_head = head > 0 && state.posted_bytes == head;
  chunk.ends_all = state.posted_bytes == state.total_bytes;
  return chunk;
}

}  // namespace

void TransferQueue::add(int flow, std::shared_ptr<Transfer> transfer) {
  Flow& state = flows_[flow];
  if (state.transfers.empty()) turns_.push_back(flow);
  state.transfers.push_back(std::move(transfer));
}

// A flow alone may fill the window; among several each has an equal part, and at least one chunk.
int64_t TransferQueue::share() const {
  int64_t active = 0;
  for (const auto& [number, flow] : flows_)
    active += !flow.transfers.empty() || flow.outstanding > 0 ? 1 : 0;
  return std::max(window_ / std::max<int64_t>(active, 1), chunk_);
}

bool TransferQueue::next(int* flow, Chunk* chunk) {
  const int64_t share_bytes = share();
  for (size_t tried = turns_.size(); tried > 0; --tried) {
    const int number = turns_.front();
    Flow& state = flows_[number];
    // Whatever its size, one chunk may go when nothing is out: a window below a chunk must not stop
    // everything.
    const bool flow_full = state.outstanding > 0 && state.outstanding + chunk_ > share_bytes;
    const bool rail_full = outstanding_ > 0 && outstanding_ + chunk_ > window_;
    if (rail_full) return false;
    turns_.pop_front();
    if (flow_full) {
      turns_.push_back(number);
      continue;
    }
    *chunk = cut(state.transfers.front(), chunk_);
    *flow = number;
    state.outstanding += chunk->bytes;
    outstanding_ += chunk->bytes;
    if (chunk->ends_all) state.transfers.pop_front();
    if (!state.transfers.empty()) turns_.push_back(number);
    return true;
  }
  return false;
}

void TransferQueue::landed(int flow, int64_t bytes) {
  outstanding_ -= bytes;
  const auto found = flows_.find(flow);
  if (found == flows_.end()) return;
  found->second.outstanding -= bytes;
  if (found->second.outstanding == 0 && found->second.transfers.empty()) flows_.erase(found);
}

void TransferQueue::drop(int flow) {
  turns_.erase(std::remove(turns_.begin(), turns_.end(), flow), turns_.end());
  const auto found = flows_.find(flow);
  if (found == flows_.end()) return;
  found->second.transfers.clear();
  if (found->second.outstanding == 0) flows_.erase(found);
}

}  // namespace tide
