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
                        std::size_t count, DType dtype, int tag) {
  Way& way = find(name, true);
  std::string id;
  if (way.num_mailed == 0) {
    id = world_.library_.make_id();
    way.communicator = world_.library_.join(id, 2, 0);
    world_.communicators_.push_back(way.communicator);
  }
  std::ostringstream header;
  header << tag << " " << static_cast<int>(dtype) << " " << count << " " << id;
  world_.line_->mail(to, name + "/" + std::to_string(way.num_mailed++),
                     header.str());
  Message message;
  message.call = std::move(call);
  message.data = const_cast<void*>(data);
  message.count = count;
  message.dtype = dtype;
  message.tag = tag;
  way.posted.push_back(std::move(message));
}

void NcclMessages::recv(const std::string& name, std::shared_ptr<NcclCall> call,
                        void* data, std::size_t count, DType dtype, int tag) {
  Way& way = find(name, false);
  Message message;
  message.call = std::move(call);
  message.data = data;
  message.count = count;
  message.dtype = dtype;
  message.tag = tag;
  way.posted.push_back(std::move(message));
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
    // NCCL takes one message at a time.
    if (way.in_progress) {
      if (!way.communicator->is_ready()) return;
      Message message = *std::exchange(way.in_progress, std::nullopt);
      if (message.call != nullptr) {
        world_.mark_issued(*message.call, way.stream);
      } else {
        way.early[message.tag].push_back(std::move(message));
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
  header.id = text->substr(static_cast<std::size_t>(in.tellg()) + 1);
  way.header = std::move(header);
  return true;
}

bool NcclMessages::connect(Way& way) {
  if (way.is_connected) return true;
  if (way.communicator == nullptr) {
    world_.runtime_.use(world_.gpu_.index());
    way.communicator = world_.library_.join(way.header->id, 2, 1);
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
  const auto wanted =
      std::find_if(way.posted.begin(), way.posted.end(),
                   [&](const Message& m) { return m.tag == header.tag; });
  if (wanted != way.posted.end()) {
    // Of a difference the coordinator tells all ranks.
    if (wanted->dtype != header.dtype || wanted->count != header.count) {
      return {};
    }
    Message message = std::move(*wanted);
    way.posted.erase(wanted);
    way.header.reset();
    return message;
  }
  Message early;
  early.count = header.count;
  early.dtype = header.dtype;
  early.tag = header.tag;
  early.block = world_.take_block(header.count * dtype_bytes(header.dtype));
  early.data = early.block.get();
  way.header.reset();
  return early;
}

// Receives whose messages are here already.
void NcclMessages::take_early(Way& way) {
  for (auto it = way.posted.begin(); it != way.posted.end();) {
    const auto found = way.early.find(it->tag);
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
        std::min(early.count * dtype_bytes(early.dtype),
                 message.count * dtype_bytes(message.dtype));
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
  if (message.count > 0 && way.sends) {
    way.communicator->send(message.data, message.count, message.dtype, 1,
                           stream);
  } else if (message.count > 0) {
    way.communicator->recv(message.data, message.count, message.dtype, 0,
                           stream);
  }
  way.in_progress = std::move(message);
}

}  // namespace shardbook::internal
