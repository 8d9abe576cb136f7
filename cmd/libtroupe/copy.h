#include <stddef.h>

// copy_past_caches copies n bytes between memory that does not overlap. The caches keep what they had.
void copy_past_caches(char *to, const char *from, size_t n);
