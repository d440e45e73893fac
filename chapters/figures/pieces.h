#pragma once

// Four ranks with tensors of four pieces, as collectives change them.
//
// Piece p of rank r is the number 2^(4 p + r). So each number in a result says
// which piece it is of, and which ranks it sums.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "chapters/pictures/figure.h"
#include "comm/process_group.h"

namespace shardbook::figures {

constexpr int kPieceRanks = 4;

/// The pieces of one tensor; none where a rank has no tensor.
using Pieces = std::vector<double>;

/// The four pieces of a rank, or one of them.
Tensor all_pieces(int rank);
Tensor one_piece(int rank, int piece);
Pieces pieces_of(const Tensor& tensor);

/// Places for four pieces: one that the rank does not have is pale. A piece of
/// one rank has its colour and its letter; a sum of all ranks is dark, with a
/// capital letter. A tensor of one piece has it at its place among the four.
void draw_pieces(pictures::Figure& figure, const Pieces& pieces, double x,
                 double y);
/// The side of a place of draw_pieces.
constexpr double kPiece = 18;

/// Messages of one frame are on their way at the same time.
struct Message {
  int from = 0, to = 0;
  std::int64_t first = 0, count = 0;  ///< pieces
};
struct Frame {
  /// Before the messages. A sum on its way is at its piece's place.
  std::vector<Pieces> ranks;
  std::vector<Message> messages;
};
/// What the collective sends, step by step, and the result as a last frame. It
/// works on the four pieces of each rank, and leaves its result in their places.
std::vector<Frame> frames_of(
    const std::function<void(ProcessGroup& group, const Tensor& tensor)>&
        collective);
/// The frames in rows of three: a piece has a stripe in the colour of each rank
/// that it sums. Pieces that are sent have a border, and an arrow leads from
/// each to the rank that receives it, behind the ranks between them. Below a
/// frame: the bytes that each rank has sent before it.
void draw_frames(pictures::Figure& figure, const std::vector<Frame>& frames,
                 const std::vector<std::string>& titles);

}  // namespace shardbook::figures
