"""Plain technical prose to measure quality on, written for this project: what a computer does, told from the bottom up."""

TEXT = """\
Most people who use a computer every day have never seen one work. They see a screen that changes and a keyboard that is warm in the
middle of the afternoon, and between the two there is a box about which they know that it must not fall into water. That is a pity,
because what goes on inside is not magic. It is a great many simple things done quickly, and each of them can be understood by
anybody who is willing to sit down for an hour.

Begin with memory. A memory is a long row of boxes, and every box has a number that is called its address. A box holds a small
number, from nothing to two hundred and fifty-five, and nothing else. There is no label on it that says whether the number is a
letter, a colour, or a part of somebody's salary. The meaning is in the program that reads the box. If a program takes a picture for
a song, it will play the picture, and the result will be noise. Much of the history of programming is the history of tools that keep
people from making that mistake.

The processor is the part that does something. It reads a number from memory, and that number tells it what to do: add these two
values, compare them, store the result over there, or continue with the instruction at some other address. It does this a few
billion times in a second. Each step is so small that a child could do it with a pencil, and the child would need about a hundred
years for what the machine does while you blink. Nothing else about computers is as important as this. They are not clever. They
are fast, they do not get bored, and they do not forget.

Speed has a price, and the price is distance. A signal in a wire travels at a good part of the speed of light, but a good part of
the speed of light is only a few centimetres in the time that a processor needs for one step. A memory that is large has to be far
away, because its boxes need room, and so a large memory is slow. A small memory can be near, and is fast. Engineers have therefore
built a ladder: a handful of registers inside the processor, then a cache of some thousand bytes, a larger cache behind that one,
then the main memory, and at last the disk. When a program asks for a number, the machine looks for it on the lowest step first. If
it is there, the answer comes at once. If it is not, the processor waits, and while it waits it does nothing at all.

This is why two programs that do exactly the same arithmetic can differ in speed by a factor of a hundred. One of them reads its
numbers in the order in which they lie in memory. The hardware notices the pattern, fetches the next numbers before they are asked
for, and the processor never has to wait. The other program jumps from place to place. Each jump is a trip to the far end of the
ladder. A good programmer does not count the additions and multiplications first. She asks where the data lies, how often it has to
be moved, and whether something that was moved once can be used several times before it is thrown away.

The multiplication of two matrices is the best example that we have. If each of them has a thousand rows and a thousand columns,
there are a million numbers in each, but the product needs a billion multiplications. Every number is used a thousand times. A
program that fetches a number from main memory for each use will spend nearly all its time waiting. A program that cuts the
matrices into small square blocks, loads two blocks into the cache, and multiplies everything that can be multiplied before it
loads the next ones, will keep the arithmetic units busy almost all the time. The two programs give the same answer. One of them
needs a minute and the other one needs less than a second.

If one of the matrices has only a single row, however, the trick does not work. Then every number of the large matrix is used
exactly once, and there is nothing to keep. The time that the product takes is the time that it takes to read the matrix, and no
amount of cleverness in the arithmetic will change that. There are only two ways out. One is to make the matrix smaller, for
example by storing each number in eight bits instead of thirty-two. The other is to find more rows, so that what has been read can
be used for all of them. A service with many users has many rows. It only needs to collect them, and to multiply them all together
while the matrix passes by.

That, in short, is what happens when a large language model writes a sentence. The model is a set of matrices, and for each word
that it writes all of them have to be read. For one user this is a terrible waste: billions of numbers are moved, each of them is
used once, and at the end there is one word. For sixteen users the same numbers are moved only once, and at the end there are sixteen
words. The cost of the second user is almost nothing. It follows that a good server tries to keep its batch full. It also follows
that the question of who may join the batch, and when, is worth more thought than it seems to deserve at first.

The simplest answer is to wait until sixteen requests have arrived, to work on them until all of them are finished, and then to take
the next sixteen. It is easy to program and easy to explain. It is also slow, for the same reason that a bus is slow which does not
leave a stop before its last passenger has got off. Some requests want a single word and some want an essay. As soon as the short
ones are done, their seats are empty, and they stay empty until the essay is finished. Meanwhile there are people standing in the
rain. The better answer is to look at the batch again after every word: whoever has finished leaves, and whoever is waiting takes
the seat. The idea is obvious once it has been said, and it made the servers of its time several times faster.

It has a cost of its own, which is memory. To write the next word of a text, the model has to remember what it computed for all
words before. These notes grow with every word, nobody knows beforehand how long a text will be, and there are as many sets of notes
as there are texts in the batch. If room is set aside for the longest text that could come, most of it will never be used. If too
little is set aside, the notes have to be moved when they grow, and moving them takes time. Operating systems had the same trouble
sixty years ago with programs that did not know how much memory they would want, and they solved it with pages. Memory is cut into
pieces of equal size. A program gets a piece when it needs one, the pieces may lie anywhere, and a table says where each of them is.

The table is what makes everything else possible. Two texts that begin with the same page of instructions can share the pieces in
which the notes about that page are kept, and nobody has to compute them twice. A text that is to be continued in three different
ways needs only one copy of its beginning, until one of the three wants to change something, and then a single piece is copied. If
memory runs out, the pieces of one unlucky text can be taken away and given to the others. When its turn comes again, its notes are
computed a second time, which is annoying but not wrong. The user sees a short pause. He does not see that his words were written by
a program that had forgotten everything about him and was reminded of it.

None of this is visible in the answer, and it must not be. A text that was written alone and one that was written in a full batch
have to be the same text, down to the last letter. It sounds like a modest demand, but it is the hardest one of all, because
computers do not calculate with real numbers. They round. If the same four numbers are added in a different order, the sum may differ
in its last digit, and once in a while the last digit decides which of two words is a little more likely than the other. People who
build such systems learn to respect the last digit. They write down in which order things are added, they compare their results
with those of a slow program that everybody trusts, and they are suspicious of every difference that they cannot explain.

It is a good habit in general. A measurement that has not been repeated is a rumour, and a fast program that gives wrong answers is
worth less than no program at all. When you make something faster, first find out how fast it could possibly be: how many bytes have
to be read, how quickly this machine can read them, and what would be left to do if everything else were free. Then look where the
time goes. It will not be where you thought. Change one thing, measure again on the same machine and on the same day, and keep the
change only if the numbers say so. Most ideas do not survive this treatment. The few that do are worth telling others about, together
with the numbers, the machine, and the way in which they were obtained, so that anyone who doubts them can try for himself. That is
all there is to the craft, and it is enough for a lifetime of work.
"""
