// Wrong programs: seeded mutations of right ones. The checker must refuse every one, but those that
// do the same: equal canonical form, that is, every byte of every memory sees the same reads and
// writes in the same order as before.
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <optional>
#include <random>

#include "backend/plan/checker.h"
#include "backend/plan/checker_sequence.h"
#include "tests/unit/plan_fixture.h"

namespace tide {
namespace {

using testing::all_processes;
using testing::column_parameter;
using testing::flat_parameter;
using testing::make_layout;
using testing::reduce_all;

constexpr int kRanks = 3;
constexpr int kTimes = 3;

enum class Mutation {
  kDropStep,
  kSwapSteps,
  kSwapNeighbours,
  kRepeatStep,
  kShortenCopy,
  kWrongPeer,
  kWrongValue,
  kWrongArea,
  kWrongSlice,
  kWrongShard,
  kWrongSpace,
  kWrongCounter,
  kWrongQueue,
  kWrongOffset,
  kCount
};

const char* mutation_name(Mutation mutation) {
  static const char* const kNames[] = {
      "drop a step", "swap two steps", "swap two neighbours", "repeat a step", "shorten a copy",
      "wrong peer",  "wrong value",    "wrong area",          "wrong slice",   "wrong shard",
      "wrong space", "wrong counter",  "wrong queue",         "wrong offset"};
  return kNames[static_cast<int>(mutation)];
}

struct Choice {
  Mutation mutation = Mutation::kDropStep;
  size_t first = 0;
  size_t second = 0;
  uint32_t number = 0;
};

bool is_move(const Step& step) { return step.op != Op::kSignal && step.op != Op::kWait; }

// Another value of [0, count) than `value`.
int other_of(int value, int count, size_t number) {
  return (value + 1 + static_cast<int>(number % static_cast<size_t>(count - 1))) % count;
}

bool shorten(Program* program, Step* step, uint32_t number) {
  if (!is_move(*step) || step->first_piece == step->last_piece) return false;
  if (step->last_piece - step->first_piece > 1) {
    (number % 2 == 0 ? step->last_piece -= 1 : step->first_piece += 1);
    return true;
  }
  Piece piece = program->pieces[step->first_piece];
  piece.numel -= 1;
  step->first_piece = static_cast<int>(program->pieces.size());
  step->last_piece = step->first_piece + 1;
  program->pieces.push_back(piece);
  return true;
}

// A copy of the step's pieces whose slice offsets are moved by one alignment.
bool move_offsets(Program* program, Step* step) {
  if (!is_move(*step) || (step->from != Space::kStaging && step->to != Space::kStaging &&
                          step->from != Space::kLanding && step->to != Space::kLanding)) {
    return false;
  }
  const int first = static_cast<int>(program->pieces.size());
  for (int i = step->first_piece; i < step->last_piece; ++i) {
    Piece piece = program->pieces[i];
    piece.packed_offset += 64;
    program->pieces.push_back(piece);
  }
  step->first_piece = first;
  step->last_piece = static_cast<int>(program->pieces.size());
  return true;
}

bool mutate_step(Program* program, Step* step, const Choice& choice) {
  switch (choice.mutation) {
    case Mutation::kShortenCopy:
      return shorten(program, step, choice.number);
    case Mutation::kWrongPeer:
      if (step->op == Op::kAccumulate || step->op == Op::kCast) return false;
      step->peer = other_of(std::max(step->peer, 0), kRanks, choice.number);
      return true;
    case Mutation::kWrongValue:
      if (is_move(*step)) return false;
      step->value += choice.number % 2 == 0 ? 1u : -1u;
      return true;
    case Mutation::kWrongArea:
      if (!is_move(*step) || program->areas < 2) return false;
      step->area ^= 1;
      return step->to == Space::kStaging || step->from == Space::kStaging ||
             step->to == Space::kLanding || step->from == Space::kLanding;
    case Mutation::kWrongSlice:
      step->slice = other_of(step->slice, kRanks, choice.number);
      return step->op == Op::kCopy && (step->to == Space::kStaging || step->to == Space::kLanding ||
                                       step->from == Space::kLanding);
    case Mutation::kWrongShard:
      step->shard = other_of(step->shard, kRanks, choice.number);
      return is_move(*step);
    case Mutation::kWrongSpace:
      (choice.number % 2 == 0 ? step->from : step->to) = static_cast<Space>(other_of(
          static_cast<int>(choice.number % 2 == 0 ? step->from : step->to), 6, choice.second));
      return step->op == Op::kCopy;
    case Mutation::kWrongCounter:
      step->counter = static_cast<Counter>(
          other_of(static_cast<int>(step->counter), kCounterCount, choice.number));
      return !is_move(*step);
    case Mutation::kWrongQueue:
      step->queue =
          static_cast<Queue>(other_of(static_cast<int>(step->queue), kQueueCount, choice.number));
      return true;
    case Mutation::kWrongOffset:
      return move_offsets(program, step);
    default:
      return false;
  }
}

// The mutated program; nothing when the choice does not apply to it.
std::optional<Program> mutate(const Program& original, const Choice& choice) {
  Program program = original;
  std::vector<Step>& steps = program.steps;
  const size_t first = choice.first % steps.size();
  switch (choice.mutation) {
    case Mutation::kDropStep:
      steps.erase(steps.begin() + static_cast<ptrdiff_t>(first));
      break;
    case Mutation::kRepeatStep: {
      const Step copy = steps[first];
      steps.insert(steps.begin() + static_cast<ptrdiff_t>(first), copy);
      break;
    }
    case Mutation::kSwapSteps:
    case Mutation::kSwapNeighbours: {
      const size_t second =
          (choice.mutation == Mutation::kSwapSteps ? choice.second : first + 1) % steps.size();
      if (first == second) return std::nullopt;
      std::swap(steps[first], steps[second]);
      break;
    }
    default:
      if (!mutate_step(&program, &steps[first], choice)) return std::nullopt;
  }
  program.last_gradient_read = -1;
  for (int i = 0; i < static_cast<int>(steps.size()); ++i) {
    if (steps[i].op == Op::kAccumulate ||
        (steps[i].op == Op::kCopy && steps[i].from == Space::kGradient)) {
      program.last_gradient_read = i;
    }
  }
  return program;
}

// ---- The right sequences ----

struct Form {
  std::string name;
  CheckedSequence sequence;
};

Form gather_form(const std::string& name, std::shared_ptr<const GroupLayout> layout,
                 const GatherOptions& options) {
  SequenceBuilder builder(kRanks);
  const int group = builder.add_group(all_processes(kRanks));
  for (int i = 0; i < kTimes; ++i) {
    const int gather = builder.gather(group, layout, options, 0);
    builder.operation(gather).slot = options.destination == Space::kSlot ? 0 : -1;
    for (Action action :
         {Action::kIssue, Action::kWait, Action::kUseGathered, Action::kUpdateShards}) {
      builder.act(action, gather);
    }
  }
  return {name, builder.sequence()};
}

// Calls run into each other: only the gradients of the last but one call must have been read.
Form reduce_form(const std::string& name, std::shared_ptr<const GroupLayout> layout,
                 const ReduceOptions& options) {
  SequenceBuilder builder(kRanks);
  const int group = builder.add_group(all_processes(kRanks));
  for (int i = 0; i < kTimes; ++i) {
    const int reduce = builder.reduce(group, layout, options);
    CheckedOperation& operation = builder.operation(reduce);
    operation.outputs = i;
    operation.gradients = i % 2;
    operation.slot = options.areas == 1 ? i % 2 : -1;
    if (i >= 2) {
      operation.after = {{reduce - 2, Dependency::Until::kSummed}};
      builder.act(Action::kWaitRead, reduce - 2);
    }
    builder.act(Action::kWriteGradients, reduce);
    builder.act(Action::kIssue, reduce);
  }
  for (int i = 0; i < kTimes; ++i) {
    builder.act(Action::kWait, i);
    builder.act(Action::kReadSummed, i);
  }
  return {name, builder.sequence()};
}

std::vector<Form> right_forms() {
  const auto layout = make_layout({flat_parameter(100, kRanks), column_parameter(3, 10, kRanks),
                                   flat_parameter(2, kRanks), flat_parameter(64, kRanks)},
                                  kRanks);
  Parameter master = flat_parameter(50, kRanks);
  master.shard_dtype = DType::kFloat32;
  const auto masters = make_layout({master, flat_parameter(31, kRanks), master}, kRanks);
  ReduceOptions subset = reduce_all(*layout, 2, 64);
  subset.subset = {0, 3};
  subset.dtypes = {DType::kBFloat16, DType::kFloat32};
  std::vector<Form> forms;
  forms.push_back(gather_form("gather to slots", layout, {}));
  forms.push_back(gather_form("gather with casts", masters, {}));
  forms.push_back(gather_form("straight gather to outputs", layout, {Space::kOutput, false, 64}));
  forms.push_back(gather_form("bounced gather", layout, {Space::kOutput, true, 64}));
  forms.push_back(reduce_form("leased reduce", layout, reduce_all(*layout, 1, 0)));
  forms.push_back(reduce_form("area reduce", layout, reduce_all(*layout, 2, 64)));
  forms.push_back(reduce_form("area reduce of a subset", layout, subset));
  return forms;
}

// The mutation in the programs of one rank (what a damaged cache entry would do), or of all (what a
// wrong plan would).
std::optional<CheckedSequence> mutate_sequence(const CheckedSequence& original,
                                               const Choice& choice, int only_rank) {
  CheckedSequence sequence = original;
  for (CheckedOperation& operation : sequence.operations) {
    for (int rank = 0; rank < kRanks; ++rank) {
      if (only_rank >= 0 && rank != only_rank) continue;
      std::optional<Program> program = mutate(*operation.programs[rank], choice);
      if (!program) return std::nullopt;
      operation.programs[rank] = std::make_shared<const Program>(std::move(*program));
    }
  }
  return sequence;
}

bool same_queues(const Program& a, const Program& b) {
  const auto queues = [](const Program& program) {
    std::map<Queue, std::string> texts;
    for (const Step& step : program.steps) texts[step.queue] += to_string(step) + "\n";
    return texts;
  };
  return queues(a) == queues(b);
}

// False for copies that touch only padding, or nothing.
bool moves_bytes(const GroupLayout& layout, const Program& program, const Step& step) {
  int count = 0;
  Block blocks[3];
  for (int i = step.first_piece; i < step.last_piece; ++i) {
    count += piece_blocks(layout, program.pieces[i], step.shard, blocks);
  }
  return count > 0;
}

// Why a mutant with the original's canonical form is the same collective.
std::string reason_of(const CheckedSequence& original, const CheckedSequence& mutant,
                      const Choice& choice) {
  const Program* before = nullptr;
  const Program* after = nullptr;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (mutant.operations[0].programs[rank] == original.operations[0].programs[rank]) continue;
    before = original.operations[0].programs[rank].get();
    after = mutant.operations[0].programs[rank].get();
  }
  const Step& step = before->steps[choice.first % before->steps.size()];
  if (same_queues(*before, *after))
    return "each queue has the same steps; only the list order between queues differs";
  if (is_move(step) && !moves_bytes(*original.operations[0].layout, *before, step))
    return "the step moves no bytes";
  if (choice.mutation == Mutation::kWrongQueue) return "the other queue orders the step as well";
  if (step.op == Op::kWait) return "another wait implies this one";
  if (step.op == Op::kSignal && choice.mutation == Mutation::kDropStep)
    return "a later signal stands for this one";
  if (step.op == Op::kSignal)
    return "the signal still comes behind what it announces and before who waits for it";
  return "the step moves the same bytes between the same waits and signals";
}

TEST(CheckerMutationsTest, AllCaughtOrEqual) {
  constexpr int kPerForm = 140;
  int caught = 0;
  std::map<std::string, int> survivors;  // by what was done and why it is the same
  std::map<std::string, int> refusals;   // by the mutation
  for (const Form& form : right_forms()) {
    const CheckReport right = check_all(form.sequence, 2);
    ASSERT_EQ(right.error, "") << form.name;
    std::mt19937 random(2024);
    for (int done = 0, tries = 0; done < kPerForm && tries < 20 * kPerForm; ++tries) {
      Choice choice;
      choice.mutation = static_cast<Mutation>(random() % static_cast<uint32_t>(Mutation::kCount));
      choice.first = random();
      choice.second = random();
      choice.number = random();
      const int only_rank = random() % 2 == 0 ? -1 : static_cast<int>(random() % kRanks);
      const auto mutant = mutate_sequence(form.sequence, choice, only_rank);
      if (!mutant) continue;
      ++done;
      const CheckReport report = check_all(*mutant, 2);
      if (!report.is_ok()) {
        ++caught;
        ++refusals[mutation_name(choice.mutation)];
        continue;
      }
      const Program& original = *form.sequence.operations[0].programs[std::max(only_rank, 0)];
      EXPECT_EQ(report.canonical, right.canonical)
          << form.name << ": " << mutation_name(choice.mutation) << " at "
          << choice.first % original.steps.size()
          << (only_rank < 0 ? " on all ranks" : " on one rank") << " was not caught\n"
          << to_string(original) << "became\n"
          << to_string(*mutant->operations[0].programs[std::max(only_rank, 0)]);
      ++survivors[form.name + ", " + mutation_name(choice.mutation) + ": " +
                  reason_of(form.sequence, *mutant, choice)];
    }
  }
  std::printf("%d mutants refused\n", caught);
  for (const auto& [what, count] : refusals) std::printf("  %4d  %s\n", count, what.c_str());
  std::printf("mutants that are the same collective:\n");
  for (const auto& [what, count] : survivors) std::printf("  %4d  %s\n", count, what.c_str());
  EXPECT_EQ(refusals.size(), static_cast<size_t>(Mutation::kCount))
      << "a kind of mutation was never tried";
}

}  // namespace
}  // namespace tide
