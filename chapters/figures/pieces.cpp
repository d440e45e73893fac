#include "chapters/figures/pieces.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "chapters/pictures/shapes.h"
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

// Notes the messages of this rank, and its tensor before each of them.
class RecordingGroup : public ProcessGroup {
 public:
  struct Step {
    Pieces before;
    Message message;
  };

  RecordingGroup(ProcessGroup& inner, const Tensor& tensor)
      : ProcessGroup(inner.rank(), inner.ranks(), inner.name()),
        inner_(inner),
        tensor_(tensor) {}

  const std::vector<Step>& steps() const { return steps_; }

  std::vector<std::string> exchange(const std::string& text) override {
    return inner_.exchange(text);
  }
  void set_timeout(std::chrono::milliseconds timeout) override {
    inner_.set_timeout(timeout);
  }
  void abort(const std::string& reason) override { inner_.abort(reason); }

 protected:
  Work do_collective(const CommCall& call,
                     const CommBuffers& buffers) override {
    return inner_.issue(call, buffers);
  }
  // A swap begins with its recv
  Work do_recv(const Tensor& tensor, const CommCall& call) override {
    before_ = pieces_of(tensor_);
    return inner_.recv(tensor, call.root_or_peer);
  }
  Work do_send(const Tensor& tensor, const CommCall& call) override {
    const auto offset = static_cast<const double*>(tensor.raw()) -
                        static_cast<const double*>(tensor_.raw());
    steps_.push_back(
        {before_, {rank(), call.root_or_peer, offset, tensor.numel()}});
    return inner_.send(tensor, call.root_or_peer);
  }
  std::shared_ptr<ProcessGroup> do_subgroup(const std::vector<int>& members,
                                            const std::string& name) override {
    return inner_.subgroup_of(members, name);
  }

 private:
  ProcessGroup& inner_;
  Tensor tensor_;
  Pieces before_;
  std::vector<Step> steps_;
};

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
    figure.colored_box({left, y, kPiece - 1, kPiece - 1}, color);
    figure.middle(
        left + (kPiece - 1) / 2, y + 13,
        std::string(1, static_cast<char>((is_sum ? 'A' : 'a') + piece)),
        kWhite);
  }
}

std::vector<Frame> frames_of(
    const std::function<void(ProcessGroup& group, const Tensor& tensor)>&
        all_reduce) {
  std::vector<Frame> frames;
  std::mutex mutex;
  run_ranks(kPieceRanks, [&](ProcessGroup& world) {
    const Tensor tensor = all_pieces(world.rank());
    RecordingGroup group(world, tensor);
    all_reduce(group, tensor);
    const std::lock_guard lock(mutex);
    const auto rank = static_cast<std::size_t>(world.rank());
    frames.resize(group.steps().size() + 1);
    for (Frame& frame : frames) {
      frame.ranks.resize(kPieceRanks);
      frame.messages.resize(kPieceRanks);
    }
    for (std::size_t i = 0; i < group.steps().size(); ++i) {
      frames[i].ranks[rank] = group.steps()[i].before;
      frames[i].messages[rank] = group.steps()[i].message;
    }
    frames.back().ranks[rank] = pieces_of(tensor);
  });
  frames.back().messages.clear();
  return frames;
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
    const double left = kLeft + kFrame * static_cast<double>(f % 3);
    if (f % 3 == 0) top = figure.add_row(kRow);
    figure.text(left, top + 14, titles[f]);
    for (int p = 0; p < 4; ++p) {
      figure.middle(left + kPlace * p + kCell / 2, top + 32,
                    std::string(1, "abcd"[p]), kMuted);
    }
    const auto y_of = [&](int rank) {
      return top + 40 + rank * (kHeight + kGap);
    };
    const auto x_of = [&](std::int64_t piece) {
      return left + kPlace * static_cast<double>(piece);
    };
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
      thick_arrow(figure,
                  {x, y_of(message.from) + (is_down ? kHeight + 2 : -2)},
                  {x, y_of(message.to) + (is_down ? -1 : kHeight + 1)});
    }
    for (int rank = 0; rank < kPieceRanks; ++rank) {
      const double y = y_of(rank);
      if (f % 3 == 0) {
        rank_name(figure, 0, y + 13, rank);
      }
      for (int p = 0; p < 4; ++p) {
        const unsigned ranks =
            content_of(frame.ranks[static_cast<std::size_t>(rank)]
                                  [static_cast<std::size_t>(p)])
                .ranks;
        figure.box({x_of(p), y, kCell, kHeight}, "empty");
        for (int r = 0; r < kPieceRanks; ++r) {
          if ((ranks >> r & 1) == 0) continue;
          figure.colored_box({x_of(p) + kStripe * r, y, kStripe, kHeight},
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
