#include "transports/ucx/configuration.h"

namespace tide {
namespace {

constexpr unsigned kSince21 = 1 << 16 | 21;
constexpr unsigned kSince22 = 1 << 16 | 22;

std::vector<UcxSetting> wanted_settings(const std::string& device, bool rdma) {
  std::vector<UcxSetting> settings = {
      {"NET_DEVICES", device},
      {"MAX_RMA_RAILS", "1"},
      {"MAX_EAGER_RAILS", "1"},
      {"MAX_RNDV_RAILS", "1"},
      {"KEEPALIVE_INTERVAL", "2s"},
      // With error handling and rendezvous both on, UCX emulates puts over tcp.
      {"RNDV_THRESH", "inf", true},
      {"PROTO_ENABLE", "y", true},
      {"PROTO_EMULATION_ENABLE", "n", true, kSince21},
  };
  const std::vector<UcxSetting> tcp = {
      {"TLS", "tcp,self"},
      {"TCP_KEEPIDLE", "2s"},
      {"TCP_KEEPINTVL", "1s"},
      {"TCP_KEEPCNT", "3"},
      {"TCP_USER_TIMEOUT", "10s", false, kSince22},
  };
  const std::vector<UcxSetting> verbs = {
      {"TLS", "rc,cuda_copy,self"},
      {"IB_NUM_PATHS", "1"},
      {"RC_TIMEOUT", "500ms"},
      {"RC_RETRY_COUNT", "7"},
      {"CUDA_COPY_REG_WHOLE_ALLOC", "off"},
  };
  const auto& more = rdma ? verbs : tcp;
  settings.insert(settings.end(), more.begin(), more.end());
  return settings;
}

}  // namespace

UcxConfiguration make_ucx_configuration(
    const std::string& device, bool rdma, unsigned version,
    const std::function<const char*(const char*)>& environment) {
  UcxConfiguration configuration;
  for (const UcxSetting& setting : wanted_settings(device, rdma)) {
    if (version < setting.since) continue;
    const std::string name = "UCX_" + setting.key;
    const char* theirs = environment(name.c_str());
    if (theirs == nullptr || setting.value == theirs) {
      configuration.settings.push_back(setting);
    } else if (setting.required) {
      configuration.settings.push_back(setting);
      configuration.notes.push_back(name + "=" + theirs + " is not followed: without " +
                                    setting.value + " UCX would copy instead of putting");
    } else {
      configuration.notes.push_back(name + "=" + theirs + " is followed instead of tide's " +
                                    setting.value);
    }
  }
  return configuration;
}

bool is_wanted_transport(const std::string& transport, bool rdma) {
  if (!rdma) return transport == "tcp";
  return transport.rfind("rc", 0) == 0 || transport.rfind("ud", 0) == 0;
}

}  // namespace tide
