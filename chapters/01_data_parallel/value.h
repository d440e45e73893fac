#pragma once

// The input or output of a forward: a tree whose leaves are tensors and other
// objects.
//
//   Value batch(Value::Dictionary{{"tokens", tokens}, {"name", Value::of(n)}});
//   batch["tokens"].tensor();

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace shardbook::data_parallel {

/// A tensor, a list, a dictionary, or any other object, which is shared and
/// never copied. A default-constructed Value is the null object. Copies are
/// cheap for tensors and objects. The accessors throw shardbook::Error on
/// another kind.
class Value {
 public:
  using List = std::vector<Value>;
  using Dictionary = std::map<std::string, Value>;
  using Object = std::shared_ptr<void>;

  Value() = default;
  Value(Tensor tensor) : kind_(Kind::kTensor), tensor_(std::move(tensor)) {}
  Value(List list) : kind_(Kind::kList), list_(std::move(list)) {}
  Value(Dictionary dictionary)
      : kind_(Kind::kDictionary), dictionary_(std::move(dictionary)) {}
  /// Any other object, by reference.
  template <typename T>
  static Value of(std::shared_ptr<T> object) {
    Value value;
    value.object_ = std::move(object);
    return value;
  }

  bool is_tensor() const { return kind_ == Kind::kTensor; }
  bool is_list() const { return kind_ == Kind::kList; }
  bool is_dictionary() const { return kind_ == Kind::kDictionary; }
  bool is_object() const { return kind_ == Kind::kObject; }

  const Tensor& tensor() const;
  const List& list() const;
  const Dictionary& dictionary() const;
  const Object& object() const;
  /// The object as what it was made from; the caller knows its type.
  template <typename T>
  std::shared_ptr<T> object_as() const {
    return std::static_pointer_cast<T>(object());
  }

  /// Entry of a list, of a dictionary. Throws Error when there is none.
  const Value& operator[](std::size_t index) const;
  const Value& operator[](const std::string& key) const;

  /// "a tensor", "a list", "a dictionary", "an object".
  const char* kind_name() const;

 private:
  enum class Kind { kObject, kTensor, kList, kDictionary };
  // One of the four is in use.
  Kind kind_ = Kind::kObject;
  Object object_;
  Tensor tensor_;
  List list_;
  Dictionary dictionary_;
};

/// All tensors of the tree, in order; dictionaries by key.
Tensors tensors_of(const Value& value);

}  // namespace shardbook::data_parallel
