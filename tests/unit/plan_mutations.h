// Wrong programs for the checker's tests: seeded mutations of right sequences, and the demand that
// each is refused unless it is the same collective (equal canonical form: every byte of every
// memory sees the same reads and writes in the same order as before).
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backend/plan/checker.h"
#include "backend/plan/checker_sequence.h"

namespace tide::testing {

enum class Mutation {
  kDropStep,
  kSwapSteps,
  kSwapNeighbours,
  kRepeatStep,
  kShortenMove,
  kWrongPeer,
  kWrongValue,
  kWrongArea,
  kWrongSlice,
  kWrongShard,
  kWrongSpace,
  kWrongCounter,
  kWrongQueue,
  kWrongOffset,
  // Of network steps.
  kWrongFirstNode,
  kWrongShards,
  kWrongNode,
  kWrongRound,
  kWrongPart,
  kWrongEvent,
  kWrongBytes,
  kWrongHead,
  kCount
};
inline constexpr int kLocalMutations = static_cast<int>(Mutation::kWrongFirstNode);

inline const char* mutation_name(Mutation mutation) {
  static const char* const kNames[] = {
      "drop a step",  "swap two steps", "swap two neighbours", "repeat a step", "shorten a move",
      "wrong peer",   "wrong value",    "wrong area",          "wrong slice",   "wrong shard",
      "wrong space",  "wrong counter",  "wrong queue",         "wrong offset",  "wrong first node",
      "wrong shards", "wrong node",     "wrong round",         "wrong part",    "wrong event",
      "wrong bytes",  "wrong head"};
  return kNames[static_cast<int>(mutation)];
}

struct Choice {
  Mutation mutation = Mutation::kDropStep;
  size_t first = 0;
  size_t second = 0;
  uint32_t number = 0;
};

inline bool is_counted(const Step& step) { return step.op == Op::kSignal || step.op == Op::kWait; }
inline bool is_move(const Step& step) {
  return !is_counted(step) && (!is_network_step(step.op) || step.op == Op::kPut);
}
inline bool is_part(const Step& step) { return is_network_step(step.op) && step.op != Op::kDrain; }
inline bool is_sum(const Step& step) {
  return step.op == Op::kCombine || step.op == Op::kReadAdd || step.op == Op::kZero;
}
inline bool touches(const Step& step, std::initializer_list<Space> spaces) {
  for (Space space : spaces) {
    if (step.from == space || step.to == space) return true;
  }
  return false;
}
inline bool in_areas(const Step& step) {
  return touches(step,
                 {Space::kStaging, Space::kLanding, Space::kPartial, Space::kSeat, Space::kBlock});
}

// Another value of [0, count) than `value`.
inline int other_of(int value, int count, size_t number) {
  return (value + 1 + static_cast<int>(number % static_cast<size_t>(count - 1))) % count;
}

inline bool shorten(Program* program, Step* step, uint32_t number) {
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

// A copy of the step's pieces whose offsets in slices are moved by one alignment.
inline bool move_offsets(Program* program, Step* step) {
  if (!is_move(*step) || !(in_areas(*step) || touches(*step, {Space::kTotal}))) return false;
  const int first = static_cast<int>(program->pieces.size());
  for (int i = step->first_piece; i < step->last_piece; ++i) {
    Piece piece = program->pieces[i];
    piece.packed_offset += 64;
    piece.partial_offset += 64;
    program->pieces.push_back(piece);
  }
  step->first_piece = first;
  step->last_piece = static_cast<int>(program->pieces.size());
  return true;
}

inline bool mutate_network_step(const Program& program, Step* step, const Choice& choice) {
  const bool put = step->op == Op::kPut;
  const bool even = choice.number % 2 == 0;
  switch (choice.mutation) {
    case Mutation::kWrongFirstNode:
      if (step->op == Op::kCombine || step->op == Op::kReadAdd) {
        step->first_number += even ? 1 : -1;
        return true;
      }
      step->first_node = other_of(step->first_node, program.nodes(), choice.number);
      return put && program.direction == Direction::kGather;
    case Mutation::kWrongShards:
      step->shards += even ? 1 : -1;
      return put || is_sum(*step);
    case Mutation::kWrongNode:
      step->node = other_of(step->node, program.nodes(), choice.number);
      return is_part(*step);
    case Mutation::kWrongRound:
      step->round = static_cast<uint16_t>(other_of(step->round, step->round + 3, choice.number));
      return is_part(*step);
    case Mutation::kWrongPart:
      step->part = static_cast<uint16_t>(other_of(step->part, step->part + 3, choice.number));
      return is_part(*step);
    case Mutation::kWrongEvent:
      step->event =
          static_cast<RailEvent>(other_of(static_cast<int>(step->event), 4, choice.number));
      return step->op == Op::kArrive;
    case Mutation::kWrongBytes:
      step->bytes += even ? 2 : -2;
      return put || (step->op == Op::kArrive && step->bytes - 2 > 0);
    case Mutation::kWrongHead:
      step->head_bytes = step->head_bytes > 2 && even ? step->head_bytes - 2 : step->head_bytes + 2;
      return put;
    default:
      return false;
  }
}

inline bool mutate_step(Program* program, Step* step, const Choice& choice) {
  const bool even = choice.number % 2 == 0;
  switch (choice.mutation) {
    case Mutation::kShortenMove:
      return shorten(program, step, choice.number);
    case Mutation::kWrongPeer:
      step->peer = other_of(std::max(step->peer, 0), program->ranks, choice.number);
      return step->op == Op::kCopy || is_counted(*step);
    case Mutation::kWrongValue:
      step->value += even ? 1u : -1u;
      return is_counted(*step);
    case Mutation::kWrongArea:
      step->area ^= 1;
      return is_move(*step) && program->areas > 1 && in_areas(*step);
    case Mutation::kWrongSlice:
      if (is_sum(*step) || step->op == Op::kPut || step->op == Op::kAccumulate) {
        (even ? step->slice : step->to_slice) += choice.second % 2 == 0 ? 1 : -1;
        const bool used =
            even ? step->op != Op::kZero && step->to != Space::kOutput
                 : touches(*step, {Space::kSeat, Space::kPartial}) || step->to == Space::kTotal;
        return used && program->nodes() > 1;
      }
      step->slice = other_of(step->slice, program->ranks, choice.number);
      return step->op == Op::kCopy && touches(*step, {Space::kStaging, Space::kLanding});
    case Mutation::kWrongShard:
      step->shard = other_of(step->shard, program->ranks, choice.number);
      return is_move(*step) && step->op != Op::kPut && step->op != Op::kZero;
    case Mutation::kWrongSpace: {
      Space& space = even ? step->from : step->to;
      space = static_cast<Space>(
          other_of(static_cast<int>(space), program->nodes() > 1 ? 10 : 6, choice.second));
      return step->op == Op::kCopy || step->op == Op::kPut;
    }
    case Mutation::kWrongCounter:
      step->counter = static_cast<Counter>(
          other_of(static_cast<int>(step->counter), kCounterCount, choice.number));
      return is_counted(*step);
    case Mutation::kWrongQueue:
      step->queue =
          static_cast<Queue>(other_of(static_cast<int>(step->queue), kQueueCount, choice.number));
      return true;
    case Mutation::kWrongOffset:
      return move_offsets(program, step);
    default:
      return mutate_network_step(*program, step, choice);
  }
}

// The mutated program; nothing when the choice does not apply to it.
inline std::optional<Program> mutate(const Program& original, const Choice& choice) {
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

// In the programs of one rank (what a damaged cache entry would do), or of all (what a wrong plan
// would).
inline std::optional<CheckedSequence> mutate_sequence(const CheckedSequence& original,
                                                      const Choice& choice, int only_rank) {
  CheckedSequence sequence = original;
  for (CheckedOperation& operation : sequence.operations) {
    for (int rank = 0; rank < operation.layout->ranks(); ++rank) {
      if (only_rank >= 0 && rank != only_rank) continue;
      std::optional<Program> program = mutate(*operation.programs[rank], choice);
      if (!program) return std::nullopt;
      operation.programs[rank] = std::make_shared<const Program>(std::move(*program));
    }
  }
  return sequence;
}

inline bool same_queues(const Program& a, const Program& b) {
  const auto queues = [](const Program& program) {
    std::map<Queue, std::string> texts;
    for (const Step& step : program.steps) texts[step.queue] += to_string(step) + "\n";
    return texts;
  };
  return queues(a) == queues(b);
}

// False for copies that touch only padding, or nothing.
inline bool moves_bytes(const GroupLayout& layout, const Program& program, const Step& step) {
  if (step.op == Op::kPut || step.op == Op::kZero) return true;
  int count = 0;
  Block blocks[3];
  for (int i = step.first_piece; i < step.last_piece; ++i) {
    count += piece_blocks(layout, program.pieces[i], step.shard, blocks);
  }
  return count > 0;
}

// Why a mutant with the original's canonical form is the same collective.
inline std::string reason_of(const CheckedSequence& original, const CheckedSequence& mutant,
                             const Choice& choice) {
  const Program* before = nullptr;
  const Program* after = nullptr;
  for (size_t rank = 0; rank < original.operations[0].programs.size(); ++rank) {
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
  if (step.op == Op::kArrive) return "another event or wait implies this one";
  if (is_part(step)) return "what it says is still true when it is sent, and asked for later";
  return "the step moves the same bytes between the same waits and signals";
}

struct Form {
  std::string name;
  CheckedSequence sequence;
};

// `mutants` of each form; `mutations`: the first so many kinds. Prints what was refused, and the
// survivors with the reason why each is the same collective.
inline void expect_caught_or_equal(const std::vector<Form>& forms, int mutants, int mutations) {
  int caught = 0;
  std::map<std::string, int> survivors;
  std::map<std::string, int> refusals;
  for (size_t f = 0; f < forms.size(); ++f) {
    const Form& form = forms[f];
    const CheckReport right = check_all(form.sequence, 2);
    ASSERT_EQ(right.error, "") << form.name;
    const int ranks = form.sequence.operations[0].layout->ranks();
    std::mt19937 random(2024 + static_cast<uint32_t>(f));
    for (int done = 0, tries = 0; done < mutants && tries < 20 * mutants; ++tries) {
      Choice choice;
      choice.mutation = static_cast<Mutation>(random() % static_cast<uint32_t>(mutations));
      choice.first = random();
      choice.second = random();
      choice.number = random();
      const int only_rank =
          random() % 2 == 0 ? -1 : static_cast<int>(random() % static_cast<uint32_t>(ranks));
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
  EXPECT_EQ(refusals.size(), static_cast<size_t>(mutations))
      << "a kind of mutation was never tried";
}

}  // namespace tide::testing
