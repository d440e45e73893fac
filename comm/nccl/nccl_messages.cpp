#include "comm/nccl/nccl_messages.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "core/check.h"

namespace shardbook::internal {

NcclMessages::Way& NcclMessages::find(const std::string& name, bool sends) {
  Way& way = ways_[name];
  if (way.stream < 0) {
    way.name = name;
    way.sends = sends;
    way.stream = world_.next_stream();
  }
  return way;
}

void NcclMessages::send(const std::string& name, int to,
                        std::shared_ptr<NcclCall> call, const void* data,
                        const Header& header) {
  Way& way = find(name, true);
  if (way.num_mailed == 0) {
    way.id = world_.library_.make_id();
    way.communicator = world_.library_.join(way.id, 2, 0);
    world_.communicators_.push_back(way.communicator);
  }
  std::ostringstream text;
  text << header.tag << " " << static_cast<int>(header.dtype) << " "
       << header.count << " " << (way.num_mailed == 0 ? way.id : "");
  world_.line_->mail(to, name + "/" + std::to_string(way.num_mailed++),
                     text.str());
  way.posted.push_back({std::move(call), const_cast<void*>(data), header});
}

void NcclMessages::recv(const std::string& name, std::shared_ptr<NcclCall> call,
                        void* data, const Header& header) {
  find(name, false).posted.push_back({std::move(call), data, header});
}

void NcclMessages::advance() {
  for (auto& [name, way] : ways_) advance(way);
}

bool NcclMessages::has_waiting() const {
  return std::any_of(ways_.begin(), ways_.end(), [](const auto& entry) {
    return entry.second.in_progress || !entry.second.posted.empty();
  });
}

void NcclMessages::advance(Way& way) {
  for (;;) {
    // Give NCCL one message at a time.
    if (way.in_progress) {
      if (!way.communicator->is_ready()) return;
      Message message = *std::exchange(way.in_progress, std::nullopt);
      if (message.call != nullptr) {
        world_.mark_issued(*message.call, way.stream);
      } else {
        way.early[message.header.tag].push_back(std::move(message));
      }
    }
    if (!way.sends) take_early(way);
    if (way.posted.empty()) return;
    if (!way.sends && !read_header(way)) return;
    if (!connect(way)) return;
    std::optional<Message> message = next(way);
    if (!message) return;
    start(way, *std::move(message));
  }
}

// The first header brings the id of the communicator.
bool NcclMessages::read_header(Way& way) {
  if (way.header) return true;
  const auto text =
      world_.line_->take_mail(way.name + "/" + std::to_string(way.next));
  if (!text) return false;
  ++way.next;
  Header header;
  int dtype = 0;
  std::istringstream in(*text);
  in >> header.tag >> dtype >> header.count;
  header.dtype = static_cast<DType>(dtype);
  const std::string id = text->substr(static_cast<std::size_t>(in.tellg()) + 1);
  if (!id.empty()) way.id = id;
  way.header = header;
  return true;
}

bool NcclMessages::connect(Way& way) {
  if (way.is_connected) return true;
  if (way.communicator == nullptr) {
    world_.runtime_.use(world_.gpu_.index());
    way.communicator = world_.library_.join(way.id, 2, 1);
    world_.communicators_.push_back(way.communicator);
  }
  way.is_connected = way.communicator->is_ready();
  return way.is_connected;
}

// The message that moves next, or none while a receive is missing.
std::optional<NcclMessages::Message> NcclMessages::next(Way& way) {
  if (way.sends) {
    Message message = std::move(way.posted.front());
    way.posted.pop_front();
    return message;
  }
  const Header header = *way.header;
  const auto wanted = std::find_if(
      way.posted.begin(), way.posted.end(),
      [&](const Message& m) { return m.header.tag == header.tag; });
  if (wanted != way.posted.end()) {
    // The coordinator tells all ranks of a difference.
    if (!(wanted->header == header)) return {};
    Message message = std::move(*wanted);
    way.posted.erase(wanted);
    way.header.reset();
    return message;
  }
  const auto block = world_.take_block(header.bytes());
  way.header.reset();
  return Message{nullptr, block.get(), header, block};
}

// Completes the receives whose messages came early.
void NcclMessages::take_early(Way& way) {
  for (auto it = way.posted.begin(); it != way.posted.end();) {
    const auto found = way.early.find(it->header.tag);
    if (found == way.early.end()) {
      ++it;
      continue;
    }
    const Message early = std::move(found->second.front());
    found->second.pop_front();
    if (found->second.empty()) way.early.erase(found);
    Message message = std::move(*it);
    it = way.posted.erase(it);
    const std::size_t bytes =
        std::min(early.header.bytes(), message.header.bytes());
    world_.put_in_line(*message.call, way.stream);
    if (bytes > 0) {
      world_.runtime_.copy(message.data, early.data, bytes,
                           world_.gpu_.stream(way.stream));
    }
    message.call->block_ = early.block;
    world_.mark_issued(*message.call, way.stream);
  }
}

void NcclMessages::start(Way& way, Message message) {
  if (message.call != nullptr) world_.put_in_line(*message.call, way.stream);
  void* const stream = world_.gpu_.stream(way.stream);
  // The sender is rank 0 of the way's communicator, the receiver rank 1.
  if (message.header.count > 0) {
    way.communicator->call(
        {way.sends ? CommOp::kSend : CommOp::kRecv, message.data, message.data,
         message.header.count, message.header.dtype, ReduceOp::kSum,
         way.sends ? 1 : 0},
        stream);
  }
  way.in_progress = std::move(message);
}

}  // namespace shardbook::internal
