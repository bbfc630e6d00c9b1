// Arrays that a binding hands to Python: the vector moves into a capsule that NumPy keeps.
#pragma once
#include <initializer_list>
#include <utility>
#include <vector>

#include "bindings/module.h"

namespace noria {

template <class T> nb::object to_numpy(std::vector<T>&& values, std::initializer_list<size_t> shape) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T>(owned->data(), shape.size(), shape.begin(), owner));
}

}  // namespace noria
