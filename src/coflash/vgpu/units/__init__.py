"""The units of the virtual GPU as pure functions: what one instruction computes, and which bytes it touches.

Nothing here holds state. `arith` maps raw register values to raw register values; `descriptors`, `layouts`,
`tmem` and `tma` turn an instruction's static form and operand values into index arrays, which the machine
uses twice: to move the data, and to look up who wrote those bytes before.
"""
