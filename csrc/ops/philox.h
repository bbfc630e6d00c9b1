// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a random number
// is a function of key and counter, so that it depends on a token's place and on nothing that happened before.
#pragma once
#include <cstdint>

namespace noria {

// First word of the four.
inline uint32_t philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// In [0, 1), a multiple of 2^-24.
inline double uniform(uint64_t seed, uint32_t output_position, uint32_t choice) {
  return static_cast<double>(philox(seed, output_position, choice, 0, 0) >> 8) * 0x1p-24;
}

}  // namespace noria
