#include "chapters/01_data_parallel/value.h"

#include "core/check.h"

namespace shardbook::data_parallel {

const Tensor& Value::tensor() const {
  SB_CHECK(is_tensor(), "value: asked for a tensor, this is ", kind_name());
  return tensor_;
}

const Value::List& Value::list() const {
  SB_CHECK(is_list(), "value: asked for a list, this is ", kind_name());
  return list_;
}

const Value::Dictionary& Value::dictionary() const {
  SB_CHECK(is_dictionary(), "value: asked for a dictionary, this is ",
           kind_name());
  return dictionary_;
}

const Value::Object& Value::object() const {
  SB_CHECK(is_object(), "value: asked for an object, this is ", kind_name());
  return object_;
}

const Value& Value::operator[](std::size_t index) const {
  SB_CHECK(index < list().size(), "value: entry ", index, " of a list of ",
           list().size());
  return list()[index];
}

const Value& Value::operator[](const std::string& key) const {
  const auto found = dictionary().find(key);
  SB_CHECK(found != dictionary().end(), "value: no entry is named '", key, "'");
  return found->second;
}

const char* Value::kind_name() const {
  const char* const kNames[] = {"an object", "a tensor", "a list",
                                "a dictionary"};
  return kNames[static_cast<std::size_t>(kind_)];
}

Tensors tensors_of(const Value& value) {
  if (value.is_tensor()) return {value.tensor()};
  Tensors found;
  auto append = [&found](const Value& entry) {
    const Tensors more = tensors_of(entry);
    found.insert(found.end(), more.begin(), more.end());
  };
  if (value.is_list()) {
    for (const Value& entry : value.list()) append(entry);
  } else if (value.is_dictionary()) {
    for (const auto& [key, entry] : value.dictionary()) append(entry);
  }
  return found;
}

}  // namespace shardbook::data_parallel
