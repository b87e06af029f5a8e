#include "backend/c10d/node_setup.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "backend/c10d/prefixed_keys.h"
#include "transports/host/introduction.h"
#include "transports/ucx/rails.h"
#include "transports/ucx/ucx.h"

namespace tide {
namespace {

constexpr std::chrono::milliseconds kLongestSilence{30'000};
constexpr std::chrono::seconds kGoodbyePatience{1};

// What a rank says of itself before anything is chosen.
struct Place {
  std::string host;     // node_identity()
  std::string node;     // host, or the part of it that node_size cuts
  std::string address;  // where other hosts reach this one
};

class NodeSetup {
 public:
  NodeSetup(const NodeSetupOptions& options, std::shared_ptr<KeyValueStore> store)
      : options_(options), store_(std::move(store)) {}

  Result<GroupNodes> run() {
    TIDE_RETURN_IF_ERROR(find_places());
    TIDE_RETURN_IF_ERROR(check_topology());  // sizes: rails are not known yet
    Topology topology(locations_);
    if (topology.nodes() == 1) return GroupNodes{options_.rank, std::move(topology), nullptr, {}};
    if (options_.on_gpu) {
      return unsupported("its ranks stand on " + std::to_string(topology.nodes()) +
                         " nodes, and between nodes tide moves the processor's memory only");
    }
    TIDE_RETURN_IF_ERROR(find_rails(topology));
    TIDE_RETURN_IF_ERROR(check_topology());
    topology = Topology(locations_);
    return connect(std::move(topology));
  }

 private:
  Status unsupported(const std::string& reason) const {
    return {ErrorKind::kUnsupported, "group '" + options_.group + "': " + reason};
  }
  std::string name(int rank) const { return "rank " + std::to_string(rank); }

  // Every rank's word under `what`, by rank.
  Result<std::vector<std::string>> everyone(const std::string& what, const std::string& own) {
    const auto labelled = [&](const Status& status) {
      return Status(status.kind(), name(options_.rank) + " of group '" + options_.group +
                                       "': " + status.message());
    };
    const auto key = [&](int rank) { return "nodes/" + what + "/" + std::to_string(rank); };
    const Status said = store_->set(key(options_.rank), own);
    if (!said.is_ok()) return labelled(said);
    std::vector<std::string> words;
    for (int rank = 0; rank < options_.size; ++rank) {
      Result<std::string> word = store_->get(key(rank), options_.deadline);
      if (!word.is_ok()) return labelled(absent_rank(name(rank), word.status()));
      words.push_back(std::move(word.value()));
    }
    return words;
  }

  // Empty words where all are content; otherwise the lowest rank's refusal for all.
  Status vote(const std::string& what, const std::string& refusal) {
    const Result<std::vector<std::string>> refusals = everyone(what, refusal);
    if (!refusals.is_ok()) return refusals.status();
    for (int rank = 0; rank < options_.size; ++rank) {
      const std::string& other = refusals.value()[static_cast<size_t>(rank)];
      if (!other.empty()) return unsupported(name(rank) + ": " + other);
    }
    return Status::ok();
  }

  Status find_places() {
    const std::string host = node_identity();
    std::string node = host;
    if (options_.node_size > 0)
      node += "/" + std::to_string(options_.program_rank / options_.node_size);
    const char* master = std::getenv("MASTER_ADDR");
    const Result<std::string> address = own_address_towards(master != nullptr ? master : "");
    const Result<std::vector<std::string>> words =
        everyone("place", host + "\n" + node + "\n" + (address.is_ok() ? address.value() : ""));
    if (!words.is_ok()) return words.status();
    for (const std::string& word : words.value()) {
      const size_t first = word.find('\n');
      const size_t second = first == std::string::npos ? first : word.find('\n', first + 1);
      if (second == std::string::npos)
        return unsupported("the store holds '" + word + "' where a rank says where it stands");
      places_.push_back({word.substr(0, first), word.substr(first + 1, second - first - 1),
                         word.substr(second + 1)});
      locations_.push_back({places_.back().node, 0});
    }
    return Status::ok();
  }

  Status check_topology() const {
    const std::string reason = Topology::check(locations_);
    return reason.empty() ? Status::ok() : unsupported(reason);
  }

  // An address that a rail must lead to: of another host's rank, or of this host where all nodes
  // are parts of it.
  std::string peer_address() const {
    const std::string& own = places_[static_cast<size_t>(options_.rank)].host;
    const auto elsewhere = std::find_if(places_.begin(), places_.end(),
                                        [&](const Place& place) { return place.host != own; });
    return elsewhere == places_.end() ? "127.0.0.1" : elsewhere->address;
  }

  Status find_rails(const Topology& topology) {
    RailQuestion question;
    question.local_ranks = topology.local_ranks();
    question.named = options_.rail.rails;
    question.peer_address = peer_address();
    const Result<std::vector<RailChoice>> choices = choose_rails(question);
    if (choices.is_ok()) {
      choice_ = choices.value()[static_cast<size_t>(topology.local(options_.rank))];
    }
    TIDE_RETURN_IF_ERROR(vote("rail", choices.is_ok() ? "" : choices.status().message()));
    const Result<std::vector<std::string>> numbers =
        everyone("rail number", std::to_string(choice_.rail));
    if (!numbers.is_ok()) return numbers.status();
    for (size_t rank = 0; rank < locations_.size(); ++rank)
      locations_[rank].rail = std::atoi(numbers.value()[rank].c_str());
    return Status::ok();
  }

  Result<GroupNodes> connect(Topology topology) {
    UcxRailOptions rail_options;
    rail_options.device = choice_.device.name;
    rail_options.rdma = choice_.device.rdma;
    rail_options.library = options_.rail.library;
    rail_options.library_candidates = options_.rail.library_candidates;
    const Result<std::shared_ptr<UcxRail>> rail = rail_of_process(rail_options);

    const int local = topology.local(options_.rank);
    UcxGroupOptions group;
    group.name = options_.group;
    group.node = topology.node(options_.rank);
    group.nodes = topology.nodes();
    std::vector<int> ranks;
    for (int node = 0; node < topology.nodes(); ++node) ranks.push_back(topology.rank(node, local));
    group.names = NodeNames(std::move(ranks));
    group.rail = topology.rail(local);
    group.store =
        std::make_shared<PrefixedKeys>(store_, "nodes/rail/" + std::to_string(local) + "/");
    group.peer_timeout = std::min(options_.timeout, kLongestSilence);
    if (!rail.is_ok()) group.refusal = rail.status().message();
    Result<std::unique_ptr<Network>> network =
        connect_ucx_group(rail.is_ok() ? rail.value() : nullptr, group, options_.deadline);
    const Status agreed = vote("network", network.is_ok() ? "" : network.status().message());
    if (!agreed.is_ok()) {
      if (network.is_ok()) {
        network.value()->fail(agreed);
        (void)network.value()->close(Clock::now() + kGoodbyePatience);
      }
      return agreed;
    }
    return GroupNodes{options_.rank, std::move(topology), std::move(network.value()), choice_.note};
  }

  // One rail a device and process, shared by the groups on it.
  static Result<std::shared_ptr<UcxRail>> rail_of_process(const UcxRailOptions& options) {
    static std::mutex mutex;
    static std::map<std::string, std::weak_ptr<UcxRail>> rails;
    static pid_t owner = getpid();
    std::lock_guard<std::mutex> lock(mutex);
    if (std::exchange(owner, getpid()) != owner) rails.clear();  // a fork's rails are its parent's
    if (std::shared_ptr<UcxRail> open = rails[options.device].lock()) return open;
    Result<std::shared_ptr<UcxRail>> opened = open_ucx_rail(options);
    if (opened.is_ok()) rails[options.device] = opened.value();
    return opened;
  }

  const NodeSetupOptions& options_;
  const std::shared_ptr<KeyValueStore> store_;
  std::vector<Place> places_;            // by rank
  std::vector<RankLocation> locations_;  // by rank
  RailChoice choice_;                    // of this rank
};

}  // namespace

Result<GroupNodes> set_up_nodes(const NodeSetupOptions& options,
                                const std::shared_ptr<KeyValueStore>& store) {
  return NodeSetup(options, store).run();
}

}  // namespace tide
