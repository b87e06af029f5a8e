#include "transports/ucx/hello.h"

#include <map>

namespace tide {
namespace {

constexpr const char* kHelloMark = "tide-hello";
constexpr const char* kRegionMark = "tide-region";

// A mark, then fields as name, length and bytes: values may hold anything.
class Writer {
 public:
  explicit Writer(const char* mark) : text_(std::string(mark) + "\n") {}
  void add(const std::string& name, const std::string& value) {
    text_ += name + " " + std::to_string(value.size()) + "\n" + value + "\n";
  }
  void add(const std::string& name, uint64_t value) { add(name, std::to_string(value)); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

bool parse_number(const std::string& text, uint64_t& value) {
  if (text.empty() || text.size() > 20) return false;
  value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return false;
    value = value * 10 + static_cast<uint64_t>(c - '0');
  }
  return true;
}

class Reader {
 public:
  Reader(const std::string& text, const char* mark) {
    const std::string first = std::string(mark) + "\n";
    if (text.rfind(first, 0) != 0) return;
    size_t at = first.size();
    while (at < text.size()) {
      const size_t line = text.find('\n', at);
      const size_t space = text.find(' ', at);
      uint64_t length = 0;
      if (line == std::string::npos || space > line ||
          !parse_number(text.substr(space + 1, line - space - 1), length) || length > text.size() ||
          line + 1 + length >= text.size() || text[line + 1 + length] != '\n') {
        return;
      }
      fields_[text.substr(at, space - at)] = text.substr(line + 1, length);
      at = line + 2 + length;
    }
    good_ = true;
  }
  std::string take(const std::string& name) {
    const auto found = fields_.find(name);
    if (found != fields_.end()) return found->second;
    good_ = false;
    return {};
  }
  uint64_t take_number(const std::string& name) {
    uint64_t value = 0;
    if (!parse_number(take(name), value)) good_ = false;
    return value;
  }
  bool has(const std::string& name) const { return fields_.count(name) != 0; }
  bool good() const { return good_; }

 private:
  std::map<std::string, std::string> fields_;
  bool good_ = false;
};

}  // namespace

std::string write_hello(const Hello& hello) {
  Writer writer(kHelloMark);
  if (!hello.refusal.empty()) {
    writer.add("refusal", hello.refusal);
    return writer.text();
  }
  writer.add("protocol", static_cast<uint64_t>(hello.protocol));
  writer.add("transport", hello.transport);
  writer.add("device", hello.device);
  writer.add("host", hello.host);
  writer.add("rail", static_cast<uint64_t>(hello.rail));
  writer.add("nodes", static_cast<uint64_t>(hello.nodes));
  writer.add("ucx", hello.ucx);
  writer.add("epoch", hello.epoch);
  writer.add("scratch_base", hello.scratch_base);
  writer.add("scratch_key", hello.scratch_key);
  writer.add("address", hello.address);
  return writer.text();
}

Result<Hello> read_hello(const std::string& text) {
  Reader reader(text, kHelloMark);
  Hello hello;
  if (reader.has("refusal")) {
    hello.refusal = reader.take("refusal");
    return hello;
  }
  hello.protocol = static_cast<int>(reader.take_number("protocol"));
  hello.transport = reader.take("transport");
  hello.device = reader.take("device");
  hello.host = reader.take("host");
  hello.rail = static_cast<int>(reader.take_number("rail"));
  hello.nodes = static_cast<int>(reader.take_number("nodes"));
  hello.ucx = reader.take("ucx");
  hello.epoch = reader.take_number("epoch");
  hello.scratch_base = reader.take_number("scratch_base");
  hello.scratch_key = reader.take("scratch_key");
  hello.address = reader.take("address");
  if (!reader.good() || hello.address.empty()) {
    return Status(ErrorKind::kInvalidUse, "what it put into the store is no hello of tide (" +
                                              std::to_string(text.size()) +
                                              " bytes); run the same tide on all nodes");
  }
  return hello;
}

Status judge_hellos(const std::string& group, const std::vector<Hello>& hellos) {
  const auto name = [&](size_t node) {
    return "node " + std::to_string(node) +
           (hellos[node].host.empty() ? "" : " (" + hellos[node].host + ")");
  };
  const std::string prefix = "group '" + group + "': ";
  for (size_t node = 0; node < hellos.size(); ++node) {
    const Hello& hello = hellos[node];
    if (!hello.refusal.empty())
      return {ErrorKind::kUnsupported, prefix + name(node) + ": " + hello.refusal};
  }
  const Hello& first = hellos.front();
  for (size_t node = 1; node < hellos.size(); ++node) {
    const Hello& hello = hellos[node];
    const auto differs = [&](const std::string& what, const std::string& theirs,
                             const std::string& ours, const std::string& advice) {
      return Status(ErrorKind::kInvalidUse, prefix + name(node) + " " + what + " " + theirs + ", " +
                                                name(0) + " " + ours + "; " + advice);
    };
    if (hello.protocol != first.protocol) {
      return differs("speaks version", std::to_string(hello.protocol),
                     std::to_string(first.protocol), "run the same tide on all nodes");
    }
    if (hello.nodes != static_cast<int>(hellos.size())) {
      return differs("counts", std::to_string(hello.nodes) + " nodes", std::to_string(first.nodes),
                     "all ranks must see the same topology");
    }
    if (hello.transport != first.transport) {
      return differs("uses", hello.transport + " on " + hello.device,
                     first.transport + " on " + first.device,
                     "rails must be of one kind; see TIDE_RAILS");
    }
    if (hello.rail != first.rail) {
      return differs("brings rail", std::to_string(hello.rail) + " (" + hello.device + ")",
                     std::to_string(first.rail) + " (" + first.device + ")",
                     "ranks with one local index must have one rail on every node; see TIDE_RAILS");
    }
    if (hello.ucx.substr(0, hello.ucx.rfind('.')) != first.ucx.substr(0, first.ucx.rfind('.'))) {
      return differs("has UCX", hello.ucx, first.ucx, "versions on the wire must be the same");
    }
  }
  return Status::ok();
}

std::string write_region(uint64_t base, int64_t bytes, const std::string& key) {
  Writer writer(kRegionMark);
  writer.add("base", base);
  writer.add("bytes", static_cast<uint64_t>(bytes));
  writer.add("key", key);
  return writer.text();
}

std::string write_refusal(const std::string& reason) {
  Writer writer(kRegionMark);
  writer.add("refusal", reason);
  return writer.text();
}

Result<RegionAnswer> read_region(const std::string& text) {
  Reader reader(text, kRegionMark);
  RegionAnswer answer;
  if (reader.has("refusal")) {
    answer.refusal = reader.take("refusal");
    return answer;
  }
  answer.base = reader.take_number("base");
  answer.bytes = static_cast<int64_t>(reader.take_number("bytes"));
  answer.key = reader.take("key");
  if (!reader.good()) return Status(ErrorKind::kInvalidUse, "no answer of tide about a region");
  return answer;
}

}  // namespace tide
