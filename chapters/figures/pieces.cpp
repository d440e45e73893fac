#include "chapters/figures/pieces.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <iterator>

#include "chapters/pictures/figure.h"
#include "comm/launch.h"

namespace shardbook::figures {
namespace {

using namespace pictures;

// Which piece a number is of, and the ranks that it sums, as bits.
struct Content {
  int piece = -1;
  unsigned ranks = 0;
};

Content content_of(double number) {
  const auto bits = static_cast<unsigned>(std::lround(number));
  for (int piece = 0; piece < 4; ++piece) {
    const unsigned ranks = bits >> (4 * piece) & 15;
    if (ranks != 0) return {piece, ranks};
  }
  return {};
}

// Notes what this rank sends and waits for, round by round: the messages that it
// starts before it waits for one of them.
class RecordingGroup : public ProcessGroup {
 public:
  struct Round {
    Pieces before;
    std::vector<Message> messages;  // sent and received
  };

  RecordingGroup(ProcessGroup& inner, const Tensor& tensor)
      : ProcessGroup(inner.rank(), inner.ranks(), inner.name()),
        inner_(inner),
        tensor_(tensor) {}

  const std::deque<Round>& rounds() const { return rounds_; }

  std::vector<std::string> exchange(const std::string& text) override {
    return inner_.exchange(text);
  }
  void set_timeout(std::chrono::milliseconds timeout) override {
    inner_.set_timeout(timeout);
  }
  void abort(const std::string& reason) override { inner_.abort(reason); }

 protected:
  // An all-to-all sends piece j to rank j
  Work do_collective(const CommCall& call,
                     const CommBuffers& buffers) override {
    for (int peer = 0; peer < size() && call.op == CommOp::kAllToAll; ++peer) {
      if (peer == rank()) continue;
      round().messages.push_back({rank(), peer, peer, 1});
      round().messages.push_back({peer, rank(), rank(), 1});
    }
    return closing(inner_.issue(call, buffers));
  }
  Work do_recv(const Tensor& tensor, const CommCall& call) override {
    round().messages.push_back({call.root_or_peer, rank()});
    return closing(inner_.recv(tensor, call.root_or_peer));
  }
  // What is sent may lie in another tensor: a sum on its way
  Work do_send(const Tensor& tensor, const CommCall& call) override {
    const Pieces sent = pieces_of(tensor);
    const int first = content_of(sent[0]).piece;
    std::copy(sent.begin(), sent.end(), round().before.begin() + first);
    round().messages.push_back(
        {rank(), call.root_or_peer, first, tensor.numel()});
    return closing(inner_.send(tensor, call.root_or_peer));
  }
  std::shared_ptr<ProcessGroup> do_subgroup(const std::vector<int>& members,
                                            const std::string& name) override {
    return inner_.subgroup_of(members, name);
  }

 private:
  Round& round() {
    if (!is_open_) rounds_.push_back({pieces_of(tensor_), {}});
    is_open_ = true;
    return rounds_.back();
  }
  Work closing(Work inner) {
    const auto wait = [this, inner]() mutable {
      inner.wait();
      is_open_ = false;
    };
    return Work(wait, [inner] { return inner.done(); });
  }

  ProcessGroup& inner_;
  Tensor tensor_;
  bool is_open_ = false;
  std::deque<Round> rounds_;
};

// The rounds of each rank that have not been drawn.
using Rounds = std::array<std::deque<RecordingGroup::Round>, kPieceRanks>;

// The ranks whose next rounds send each other messages; none at the end.
std::vector<int> meeting(const Rounds& rounds) {
  std::vector<int> ranks = {0, 1, 2, 3};
  const auto waits = [&](int rank) {
    if (rounds[rank].empty()) return true;
    const auto& mine = rounds[rank].front().messages;
    return std::any_of(mine.begin(), mine.end(), [&](const Message& each) {
      const int peer = each.from == rank ? each.to : each.from;
      if (std::count(ranks.begin(), ranks.end(), peer) == 0) return true;
      const auto& theirs = rounds[peer].front().messages;
      return std::none_of(
          theirs.begin(), theirs.end(), [&](const Message& other) {
            return other.from == each.from && other.to == each.to;
          });
    });
  };
  while (true) {
    std::vector<int> others;
    std::remove_copy_if(ranks.begin(), ranks.end(), std::back_inserter(others),
                        waits);
    if (others == ranks) return ranks;
    ranks = others;
  }
}

}  // namespace

Tensor all_pieces(int rank) {
  const Tensor tensor = Tensor::empty({4}, {DType::kF64, {}});
  for (int piece = 0; piece < 4; ++piece) {
    static_cast<double*>(tensor.raw())[piece] = std::exp2(4 * piece + rank);
  }
  return tensor;
}

Tensor one_piece(int rank, int piece) {
  return Tensor::full({1}, std::exp2(4 * piece + rank), {DType::kF64, {}});
}

Pieces pieces_of(const Tensor& tensor) {
  const auto* begin = static_cast<const double*>(tensor.raw());
  return {begin, begin + tensor.numel()};
}

void draw_pieces(Figure& figure, const Pieces& pieces, double x, double y) {
  for (int place = 0; place < 4; ++place) {
    figure.box({x + kPiece * place, y, kPiece - 1, kPiece - 1}, "empty");
  }
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto [piece, ranks] = content_of(pieces[i]);
    const bool is_sum = ranks == 15;
    const std::string color =
        is_sum ? kInk
               : rank_color(static_cast<int>(std::log2(std::max(ranks, 1u))));
    const double left =
        x + kPiece * (pieces.size() == 1 ? piece : static_cast<double>(i));
    figure.box({left, y, kPiece - 1, kPiece - 1}, color);
    figure.middle(
        left + (kPiece - 1) / 2, y + 13,
        std::string(1, static_cast<char>((is_sum ? 'A' : 'a') + piece)),
        kWhite);
  }
}

std::vector<Frame> frames_of(
    const std::function<void(ProcessGroup& group, const Tensor& tensor)>&
        collective) {
  Rounds rounds;
  std::vector<Pieces> results(kPieceRanks);
  run_ranks(kPieceRanks, [&](ProcessGroup& world) {
    const Tensor tensor = all_pieces(world.rank());
    RecordingGroup group(world, tensor);
    collective(group, tensor);
    rounds[world.rank()] = group.rounds();
    results[world.rank()] = pieces_of(tensor);
  });
  std::vector<Frame> frames;
  while (true) {
    Frame& frame = frames.emplace_back();
    for (int rank = 0; rank < kPieceRanks; ++rank) {
      frame.ranks.push_back(rounds[rank].empty() ? results[rank]
                                                 : rounds[rank].front().before);
    }
    const std::vector<int> ranks = meeting(rounds);
    if (ranks.empty()) return frames;
    for (const int rank : ranks) {
      for (const Message& each : rounds[rank].front().messages) {
        if (each.from == rank) frame.messages.push_back(each);
      }
      rounds[rank].pop_front();
    }
  }
}

void draw_frames(Figure& figure, const std::vector<Frame>& frames,
                 const std::vector<std::string>& titles) {
  constexpr double kLeft = 48, kFrame = 134, kStripe = 6, kCell = 4 * kStripe,
                   kPlace = kCell + 5, kHeight = 17, kGap = 15;
  constexpr double kRow = 40 + kPieceRanks * (kHeight + kGap) + 26;
  double top = 0;
  std::int64_t sent = 0;
  for (std::size_t f = 0; f < frames.size(); ++f) {
    const Frame& frame = frames[f];
    const double left = kLeft + kFrame * (f % 3);
    if (f % 3 == 0) top = figure.add_row(kRow);
    figure.text(left, top + 14, titles[f]);
    for (int p = 0; p < 4; ++p) {
      figure.middle(left + kPlace * p + kCell / 2, top + 32,
                    std::string(1, "abcd"[p]), kMuted);
    }
    const auto y_of = [&](int rank) {
      return top + 40 + rank * (kHeight + kGap);
    };
    const auto x_of = [&](std::int64_t piece) { return left + kPlace * piece; };
    for (const Message& message : frame.messages) {
      const bool is_down = message.to > message.from;
      const int distance = std::abs(message.to - message.from);
      const int upper = std::min(message.from, message.to);
      // Two arrows that pass each other have a side each
      const double side = distance != 2 ? 0 : upper % 2 == 0 ? -5 : 5;
      const double x =
          (x_of(message.first) + x_of(message.first + message.count) -
           (kPlace - kCell)) /
              2 +
          side;
      figure.thick_arrow({x, y_of(message.from) + (is_down ? kHeight + 2 : -2)},
                         {x, y_of(message.to) + (is_down ? -1 : kHeight + 1)});
    }
    for (int rank = 0; rank < kPieceRanks; ++rank) {
      const double y = y_of(rank);
      if (f % 3 == 0) figure.rank_name(0, y + 13, rank);
      for (int p = 0; p < 4; ++p) {
        const unsigned ranks = content_of(frame.ranks[rank][p]).ranks;
        figure.box({x_of(p), y, kCell, kHeight}, "empty");
        for (int r = 0; r < kPieceRanks; ++r) {
          if ((ranks >> r & 1) == 0) continue;
          figure.box({x_of(p) + kStripe * r, y, kStripe, kHeight},
                     rank_color(r));
        }
      }
    }
    for (const Message& message : frame.messages) {
      const double width = x_of(message.first + message.count) -
                           x_of(message.first) - (kPlace - kCell) + 2;
      figure.line(fmt::format("M{} {}h{}v{}h{}z", px(x_of(message.first) - 1),
                              px(y_of(message.from) - 1), px(width),
                              px(kHeight + 2), px(-width)),
                  kInk, 2);
    }
    figure.text(left, y_of(kPieceRanks) + 3,
                sent == 0   ? "sent: 0"
                : sent == 1 ? "sent: n/4"
                            : fmt::format("sent: {}n/4", sent),
                kMuted);
    if (!frame.messages.empty()) sent += frame.messages[0].count;
  }
}

}  // namespace shardbook::figures
