// UCX as a table of its functions, found at run time by the library's SONAME; tests fill the table
// with fakes. Nothing here links against UCX: the headers give types and constants only, and fields
// newer than 1.16 are never put in a mask.
//
// One process holds one UCX. A library that is loaded already is taken; a second one beside it
// (another file, or a renamed copy that some package brought along) is a refusal, because two
// copies hang or corrupt each other.
#pragma once

#include <ucp/api/ucp.h>

#include <string>
#include <vector>

#include "backend/base/status.h"

namespace tide {

struct UcxApi {
  std::string library;  // the file it came from

  decltype(&::ucp_get_version) get_version = nullptr;
  decltype(&::ucp_get_version_string) get_version_string = nullptr;
  decltype(&::ucs_status_string) status_string = nullptr;
  decltype(&::ucp_config_read) config_read = nullptr;
  decltype(&::ucp_config_modify) config_modify = nullptr;
  decltype(&::ucp_config_release) config_release = nullptr;
  decltype(&::ucp_init_version) init_version = nullptr;
  decltype(&::ucp_cleanup) cleanup = nullptr;
  decltype(&::ucp_context_query) context_query = nullptr;
  decltype(&::ucp_worker_create) worker_create = nullptr;
  decltype(&::ucp_worker_destroy) worker_destroy = nullptr;
  decltype(&::ucp_worker_query) worker_query = nullptr;
  decltype(&::ucp_worker_release_address) worker_release_address = nullptr;
  decltype(&::ucp_worker_progress) worker_progress = nullptr;
  decltype(&::ucp_worker_get_efd) worker_get_efd = nullptr;
  decltype(&::ucp_worker_arm) worker_arm = nullptr;
  decltype(&::ucp_worker_set_am_recv_handler) worker_set_am_recv_handler = nullptr;
  decltype(&::ucp_ep_create) ep_create = nullptr;
  decltype(&::ucp_ep_close_nbx) ep_close_nbx = nullptr;
  decltype(&::ucp_ep_flush_nbx) ep_flush_nbx = nullptr;
  decltype(&::ucp_ep_query) ep_query = nullptr;
  decltype(&::ucp_ep_rkey_unpack) ep_rkey_unpack = nullptr;
  decltype(&::ucp_rkey_destroy) rkey_destroy = nullptr;
  decltype(&::ucp_mem_map) mem_map = nullptr;
  decltype(&::ucp_mem_unmap) mem_unmap = nullptr;
  decltype(&::ucp_mem_query) mem_query = nullptr;
  decltype(&::ucp_rkey_pack) rkey_pack = nullptr;
  decltype(&::ucp_rkey_buffer_release) rkey_buffer_release = nullptr;
  decltype(&::ucp_put_nbx) put_nbx = nullptr;
  decltype(&::ucp_am_send_nbx) am_send_nbx = nullptr;
  decltype(&::ucp_request_free) request_free = nullptr;

  // (1 << 16) + 22 for 1.22: compares as a number.
  unsigned version() const;
};

constexpr unsigned ucx_version(unsigned major, unsigned minor) { return major << 16 | minor; }

struct UcxSearch {
  std::string library;                  // a file: this one and no other
  std::vector<std::string> candidates;  // tried after the SONAME, e.g. the libucx wheel's
};

// Once a process: later calls give the first answer, unless it was an error. Thread-safe. Signal
// handlers that UCX installs as it is loaded are undone.
Result<const UcxApi*> load_ucx(const UcxSearch& search);

// The files of UCX's core libraries in the text of /proc/self/maps: "libucp", "libucs" of any name
// ("libucs-1a2b3c.so.0").
std::vector<std::string> ucx_copies(const std::string& maps, const std::string& stem);

// Whether the table is complete and new enough.
Status check_ucx(const UcxApi& api);

}  // namespace tide
