#include "transports/ucx/rails.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>

namespace tide {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

std::vector<std::string> entries(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string resolved(const fs::path& path) {
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  return error ? std::string() : real.string();
}

// Folders that two paths share from the root on: a root complex, a switch, the function itself.
int shared_depth(const std::string& a, const std::string& b) {
  int depth = 0;
  const fs::path first(a);
  const fs::path second(b);
  for (auto i = first.begin(), j = second.begin();
       i != first.end() && j != second.end() && *i == *j; ++i, ++j)
    ++depth;
  return depth;
}

// Active devices that may carry a rail: the fast ones, and such that stand aside only where there
// is nothing else.
std::vector<RailDevice> usable(std::vector<RailDevice> devices) {
  std::erase_if(devices, [](const RailDevice& device) { return !device.active; });
  const auto aside = [](const RailDevice& device) { return device.stands_aside; };
  if (!std::all_of(devices.begin(), devices.end(), aside)) std::erase_if(devices, aside);
  double fastest = 0;
  for (const RailDevice& device : devices) fastest = std::max(fastest, device.gigabits);
  std::erase_if(devices, [&](const RailDevice& device) { return device.gigabits < fastest / 2; });
  return devices;
}

std::vector<RailChoice> numbered(const std::vector<RailDevice>& devices) {
  std::vector<RailChoice> choices;
  std::map<std::string, int> rails;
  std::map<std::string, int> users;
  for (const RailDevice& device : devices) {
    const int next = static_cast<int>(rails.size());
    choices.push_back({device, rails.emplace(device.name, next).first->second, {}});
    ++users[device.name];
  }
  for (RailChoice& choice : choices) {
    const int sharing = users[choice.device.name];
    if (sharing > 1) {
      choice.note = std::to_string(sharing) + " local ranks share " + choice.device.name +
                    "; each gets a part of its rate";
    }
  }
  return choices;
}

Result<std::vector<RailChoice>> named_rails(const RailQuestion& question,
                                            const std::vector<RailDevice>& rdma) {
  const auto names = spelled_rails(question.named);
  if (!names.is_ok()) return names.status();
  std::vector<RailDevice> chosen;
  for (int rank = 0; rank < question.local_ranks; ++rank) {
    const std::string& name = names.value()[static_cast<size_t>(rank) % names.value().size()];
    const auto fits = [&](const RailDevice& device) {
      return device.name == name || device.name.substr(0, device.name.find(':')) == name;
    };
    const auto found = std::find_if(rdma.begin(), rdma.end(), fits);
    if (found != rdma.end()) {
      if (!found->active)
        return Status(ErrorKind::kUnsupported,
                      "TIDE_RAILS names " + name + ", whose port is not active");
      chosen.push_back(*found);
    } else if (fs::exists(fs::path(question.root) / "class/net" / name)) {
      chosen.push_back({name, false, {}, true, 0, false});
    } else {
      return Status(ErrorKind::kUnsupported,
                    "TIDE_RAILS names " + name + ", and there is no such device here");
    }
  }
  return numbered(chosen);
}

Status no_interface(const std::string& address, const std::string& why) {
  return {ErrorKind::kUnsupported, "no interface leads to '" + address + "' (" + why +
                                       "); TIDE_RAILS names one for each local rank"};
}

// Where a datagram to `address` would come from.
Result<sockaddr_storage> source_towards(const std::string& address) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const int looked_up = getaddrinfo(address.c_str(), "9", &hints, &found);
  if (looked_up != 0) return no_interface(address, gai_strerror(looked_up));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, freeaddrinfo);
  sockaddr_storage own = {};
  socklen_t length = sizeof own;
  // Connecting a datagram socket sends nothing, but picks the source address that the route wants.
  const int handle = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const bool routed = handle >= 0 && connect(handle, found->ai_addr, found->ai_addrlen) == 0 &&
                      getsockname(handle, reinterpret_cast<sockaddr*>(&own), &length) == 0;
  const std::string why = routed ? "" : std::strerror(errno);
  if (handle >= 0) close(handle);
  if (!routed) return no_interface(address, why);
  return own;
}

}  // namespace

std::vector<RailDevice> rdma_devices(const std::string& root) {
  std::vector<RailDevice> devices;
  const fs::path folder = fs::path(root) / "class/infiniband";
  for (const std::string& name : entries(folder)) {
    for (const std::string& port : entries(folder / name / "ports")) {
      RailDevice device;
      device.name = name + ":" + port;
      device.rdma = true;
      device.path = resolved(folder / name / "device");
      device.active =
          first_line(folder / name / "ports" / port / "state").find("ACTIVE") != std::string::npos;
      device.gigabits =
          std::strtod(first_line(folder / name / "ports" / port / "rate").c_str(), nullptr);
      std::error_code error;
      device.stands_aside = name.find("bond") != std::string::npos ||
                            fs::exists(folder / name / "device/physfn", error);
      devices.push_back(device);
    }
  }
  return devices;
}

Result<std::vector<std::string>> spelled_rails(const std::string& text) {
  const auto wrong = [&](const std::string& what) {
    return Status(ErrorKind::kInvalidUse, "TIDE_RAILS='" + text + "': " + what);
  };
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char c : text) {
    depth += c == '{' ? 1 : c == '}' ? -1 : 0;
    if (depth < 0 || depth > 1) return wrong("braces do not match");
    if (c == ',' && depth == 0) {
      parts.emplace_back();
    } else if (c != ' ') {
      parts.back() += c;
    }
  }
  if (depth != 0) return wrong("braces do not match");
  std::vector<std::string> names;
  for (const std::string& part : parts) {
    const size_t open = part.find('{');
    if (open == std::string::npos) {
      names.push_back(part);
      continue;
    }
    const size_t shut = part.find('}');
    std::string inside = part.substr(open + 1, shut - open - 1) + ",";
    for (size_t comma; (comma = inside.find(',')) != std::string::npos;
         inside.erase(0, comma + 1)) {
      const std::string item = inside.substr(0, comma);
      const size_t dash = item.find('-');
      const std::string first = item.substr(0, dash);
      const std::string last = dash == std::string::npos ? first : item.substr(dash + 1);
      const auto number = [](const std::string& digits) {
        const bool good =
            !digits.empty() && digits.size() < 5 &&
            std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
        return good ? std::stoi(digits) : -1;
      };
      if (number(first) < 0 || number(last) < number(first))
        return wrong("'" + item + "' is no number or range");
      for (int i = number(first); i <= number(last); ++i)
        names.push_back(part.substr(0, open) + std::to_string(i) + part.substr(shut + 1));
    }
  }
  if (std::any_of(names.begin(), names.end(), [](const std::string& name) { return name.empty(); }))
    return wrong("a name is empty");
  return names;
}

Result<std::vector<RailChoice>> choose_rails(const RailQuestion& question) {
  const std::vector<RailDevice> all = rdma_devices(question.root);
  if (!question.named.empty()) return named_rails(question, all);
  const std::vector<RailDevice> devices = usable(all);
  if (devices.empty()) {
    const Result<std::string> interface = interface_towards(question.peer_address);
    if (!interface.is_ok()) return interface.status();
    const RailDevice device{interface.value(), false, {}, true, 0, false};
    return numbered(std::vector<RailDevice>(static_cast<size_t>(question.local_ranks), device));
  }
  if (!question.gpus.empty() && static_cast<int>(question.gpus.size()) != question.local_ranks) {
    return Status(ErrorKind::kInternal, std::to_string(question.gpus.size()) +
                                            " GPUs are named for " +
                                            std::to_string(question.local_ranks) + " local ranks");
  }
  std::vector<RailDevice> chosen;
  std::vector<std::string> notes;
  std::vector<int> users(devices.size(), 0);
  for (int rank = 0; rank < question.local_ranks; ++rank) {
    std::string gpu;
    if (!question.gpus.empty()) {
      const std::string& address = question.gpus[static_cast<size_t>(rank)];
      gpu = resolved(fs::path(question.root) / "bus/pci/devices" / address);
      if (gpu.empty())
        return Status(ErrorKind::kSystem,
                      "GPU " + address + " is not in " + question.root + "/bus/pci/devices");
    }
    size_t best = 0;
    for (size_t i = 1; i < devices.size(); ++i) {
      const int nearer = shared_depth(gpu, devices[i].path) - shared_depth(gpu, devices[best].path);
      if (nearer > 0 || (nearer == 0 && users[i] < users[best])) best = i;
    }
    ++users[best];
    chosen.push_back(devices[best]);
    const std::string shared =
        resolved(fs::path(question.root) / "devices");  // all that any two devices share
    const bool far =
        !gpu.empty() && shared_depth(gpu, devices[best].path) <= shared_depth(shared, shared);
    notes.push_back(far ? devices[best].name + " is not on the root complex of GPU " +
                              question.gpus[static_cast<size_t>(rank)] + ", and no active device is"
                        : "");
  }
  std::vector<RailChoice> choices = numbered(chosen);
  for (size_t rank = 0; rank < choices.size(); ++rank) {
    std::string& note = choices[rank].note;
    if (!notes[rank].empty()) note += (note.empty() ? "" : "; ") + notes[rank];
  }
  return choices;
}

Result<std::string> own_address_towards(const std::string& address) {
  const Result<sockaddr_storage> own = source_towards(address);
  if (!own.is_ok()) return own.status();
  char text[NI_MAXHOST] = {};
  const int spelled =
      getnameinfo(reinterpret_cast<const sockaddr*>(&own.value()), sizeof(sockaddr_storage), text,
                  sizeof text, nullptr, 0, NI_NUMERICHOST);
  if (spelled != 0) return no_interface(address, gai_strerror(spelled));
  return std::string(text);
}

Result<std::string> interface_towards(const std::string& address) {
  const Result<sockaddr_storage> source = source_towards(address);
  if (!source.is_ok()) return source.status();
  const sockaddr_storage& own = source.value();
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return no_interface(address, std::strerror(errno));
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> interfaces(list, freeifaddrs);
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != own.ss_family) continue;
    const bool same =
        own.ss_family == AF_INET
            ? reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr.s_addr ==
                  reinterpret_cast<const sockaddr_in*>(&own)->sin_addr.s_addr
            : std::memcmp(&reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr,
                          &reinterpret_cast<const sockaddr_in6*>(&own)->sin6_addr, 16) == 0;
    if (same) return std::string(each->ifa_name);
  }
  return no_interface(address, "its source address is on no interface");
}

}  // namespace tide
