// Whether this processor has AMX's tiles and bfloat16 products, and the system lets this process use them.
#pragma once

namespace chairlift {

bool has_amx();

}  // namespace chairlift
