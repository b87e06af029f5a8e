// How much memory may still be taken before the kernel starts to end processes. Shared memory is
// given page by page without a promise beforehand: a request beyond what there is does not fail,
// the kernel kills for it, and not only the one who asked. So windows ask here first.
#pragma once

#include <cstdint>
#include <string>

namespace tide {

// The least of what the machine has available and what is left in this process's memory control
// groups (version 1 or 2) and their parents. `root` is "/" but for tests.
int64_t memory_room_bytes(const std::string& root = "/");

}  // namespace tide
