#include "transports/cuda/device_queue.h"

#include <algorithm>

namespace tide::cuda {
namespace {

// The driver's limit on the pitch of a 2-D copy; rows further apart go one by one.
constexpr int64_t kMostPitch = (int64_t{1} << 31) - 1;

DevicePointer address(const void* pointer) { return reinterpret_cast<DevicePointer>(pointer); }

}  // namespace

Status DeviceQueue::open(int priority, const QueueWords& words) {
  words_ = words;
  to_.reserve(kBatchPieces);
  from_.reserve(kBatchPieces);
  sizes_.reserve(kBatchPieces);
  return device_->check(device_->api().stream_create(&stream_, kStreamNonBlocking, priority),
                        "cuStreamCreateWithPriority", "making a queue");
}

DeviceQueue::~DeviceQueue() {
  // The driver lets enqueued work finish; it does not wait for it here.
  if (stream_ != nullptr) (void)device_->api().stream_destroy(stream_);
}

Status DeviceQueue::done(Code code, const char* call, const char* what) {
  ++driver_calls_;
  return code == kSuccess ? Status::ok() : device_->check(code, call, what);
}

// Lets other streams in once kBulkBytes have been sent in a row.
Status DeviceQueue::make_room(int64_t bytes) {
  if (bulk_bytes_ > 0 && bulk_bytes_ + bytes > kBulkBytes) {
    TIDE_RETURN_IF_ERROR(flush());
    TIDE_RETURN_IF_ERROR(done(device_->api().wait_value(stream_, words_.zero, 0, kWaitReached),
                              "cuStreamWaitValue32", "letting other copies in"));
    bulk_bytes_ = 0;
  }
  bulk_bytes_ += bytes;
  return Status::ok();
}

Status DeviceQueue::piece(DevicePointer to, DevicePointer from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kBulkBytes) {
    const int64_t part = std::min(kBulkBytes, bytes - at);
    TIDE_RETURN_IF_ERROR(make_room(part));
    to_.push_back(to + static_cast<DevicePointer>(at));
    from_.push_back(from + static_cast<DevicePointer>(at));
    sizes_.push_back(static_cast<size_t>(part));
    if (to_.size() >= kBatchPieces) TIDE_RETURN_IF_ERROR(flush());
  }
  return Status::ok();
}

Status DeviceQueue::rectangle(const CopyBlock& block) {
  const int64_t rows_at_once = std::max<int64_t>(1, kBulkBytes / block.row_bytes);
  for (int64_t row = 0; row < block.rows; row += rows_at_once) {
    const int64_t rows = std::min(rows_at_once, block.rows - row);
    TIDE_RETURN_IF_ERROR(flush());
    TIDE_RETURN_IF_ERROR(make_room(rows * block.row_bytes));
    Copy2D copy;
    copy.source = address(block.from) + static_cast<DevicePointer>(row * block.from_pitch);
    copy.source_pitch = static_cast<size_t>(block.from_pitch);
    copy.target = address(block.to) + static_cast<DevicePointer>(row * block.to_pitch);
    copy.target_pitch = static_cast<size_t>(block.to_pitch);
    copy.width_bytes = static_cast<size_t>(block.row_bytes);
    copy.height = static_cast<size_t>(rows);
    TIDE_RETURN_IF_ERROR(
        done(device_->api().copy_2d(&copy, stream_), "cuMemcpy2DAsync", "pushing rows"));
  }
  return Status::ok();
}

Status DeviceQueue::copy(const CopyBlock& block, int peer) {
  if (block.rows <= 0 || block.row_bytes <= 0) return Status::ok();
  dirty_[static_cast<size_t>(peer)] = 1;
  const bool is_one_run =
      block.rows == 1 || (block.to_pitch == block.row_bytes && block.from_pitch == block.row_bytes);
  if (is_one_run)
    return piece(address(block.to), address(block.from), block.rows * block.row_bytes);
  if (std::max(block.to_pitch, block.from_pitch) <= kMostPitch && block.row_bytes <= kBulkBytes)
    return rectangle(block);
  for (int64_t row = 0; row < block.rows; ++row) {
    TIDE_RETURN_IF_ERROR(piece(
        address(block.to) + static_cast<DevicePointer>(row * block.to_pitch),
        address(block.from) + static_cast<DevicePointer>(row * block.from_pitch), block.row_bytes));
  }
  return Status::ok();
}

Status DeviceQueue::flush() {
  if (to_.empty()) return Status::ok();
  Status status;
  if (to_.size() == 1) {
    status = done(device_->api().copy(to_[0], from_[0], sizes_[0], stream_), "cuMemcpyDtoDAsync",
                  "pushing a piece");
  } else {
    CopyAttributes attributes;
    size_t first = 0;
    status = done(device_->api().copy_batch(to_.data(), from_.data(), sizes_.data(), to_.size(),
                                            &attributes, &first, 1, stream_),
                  "cuMemcpyBatchAsync", "pushing pieces");
  }
  to_.clear();
  from_.clear();
  sizes_.clear();
  return status;
}

Status DeviceQueue::signal_peer(int peer, DevicePointer word, uint32_t value) {
  TIDE_RETURN_IF_ERROR(flush());
  const DriverApi& api = device_->api();
  if (dirty_[static_cast<size_t>(peer)] == 0) {
    return done(api.set_words(word, value, 1, stream_), "cuMemsetD32Async", "signalling a peer");
  }
  dirty_[static_cast<size_t>(peer)] = 0;
  if (value_ != value) {  // several peers get the same value: it is written once
    TIDE_RETURN_IF_ERROR(done(api.write_value(stream_, words_.value, value, 0),
                              "cuStreamWriteValue32", "signalling a peer"));
    value_ = value;
  }
  return done(api.copy(word, words_.value, sizeof(uint32_t), stream_), "cuMemcpyDtoDAsync",
              "signalling a peer");
}

Status DeviceQueue::signal_own(DevicePointer word, uint32_t value) {
  TIDE_RETURN_IF_ERROR(flush());
  return done(device_->api().write_value(stream_, word, value, 0), "cuStreamWriteValue32",
              "signalling the own rank");
}

Status DeviceQueue::wait(uint32_t step, DevicePointer word, uint32_t value) {
  TIDE_RETURN_IF_ERROR(flush());
  const DriverApi& api = device_->api();
  if (word == 0) {
    return done(api.write_value(stream_, words_.progress, 2 * step, 0), "cuStreamWriteValue32",
                "marking a step");
  }
  MemoryOp operations[3];
  operations[0].operation = kMemoryOpWrite32;
  operations[0].address = words_.progress;
  operations[0].value = 2 * step - 1;
  operations[1].operation = kMemoryOpWait32;
  operations[1].address = word;
  operations[1].value = value;
  operations[1].flags = kWaitReached;
  operations[2].operation = kMemoryOpWrite32;
  operations[2].address = words_.progress;
  operations[2].value = 2 * step;
  bulk_bytes_ = 0;
  return done(api.memory_ops(stream_, 3, operations, 0), "cuStreamBatchMemOp",
              "waiting for a peer");
}

}  // namespace tide::cuda
